"""What every policy owes the cache, and the kinds of traffic that policies fail at."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from expertd.cache.expert_cache import ExpertCache
from expertd.cache.policy import POLICIES, make_policy
from expertd.types import Phase

LAYERS, EXPERTS, K = 8, 64, 4
EVERY = [*POLICIES, "auto"]
Token = list[list[int]]
"""Expert indices by layer."""


def zipf(n_layers: int, n_experts: int, k: int, n_tokens: int, seed: int, power: float = 1.2) -> Iterator[Token]:
    """Each layer has its own hot experts; the same for the same seed's first draw."""
    rng = random.Random(seed)
    order = [rng.sample(range(n_experts), n_experts) for _ in range(n_layers)]
    weights = [1.0 / (rank + 1) ** power for rank in range(n_experts)]
    for _ in range(n_tokens):
        yield [[layer[r] for r in _draw(rng, weights, k)] for layer in order]


def uniform(n_layers: int, n_experts: int, k: int, n_tokens: int, seed: int) -> Iterator[Token]:
    rng = random.Random(seed)
    for _ in range(n_tokens):
        yield [rng.sample(range(n_experts), k) for _ in range(n_layers)]


def _draw(rng: random.Random, weights: list[float], k: int) -> list[int]:
    chosen: dict[int, None] = {}
    while len(chosen) < k:
        chosen[rng.choices(range(len(weights)), weights)[0]] = None
    return list(chosen)


def cache_of(policy: str, share: float = 0.25) -> ExpertCache:
    n = LAYERS * EXPERTS
    return ExpertCache([1000] * n, EXPERTS, int(n * share) * 1000, policy, n_used=K)


def ratio(cache: ExpertCache, tokens: Iterable[list[list[int]]]) -> float:
    """Hits per request of these tokens."""
    hits = n = 0
    for token in tokens:
        for layer, ids in enumerate(token):
            hits += cache.route(layer, ids).hits
            n += len(ids)
    return hits / n


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_names_residents_that_are_not_held_until_there_are_none(name: str) -> None:
    policy = make_policy(name, LAYERS, EXPERTS, 16.0)
    there = {layer * EXPERTS + i for layer in (1, 4, 7) for i in (0, 5, 63)}
    for layer in (1, 4, 7):
        policy.touch(layer, [0, 5, 63], 1)
        for i in (0, 5, 63):
            policy.insert(layer * EXPERTS + i)
    held = {1 * EXPERTS + 5, 7 * EXPERTS}
    gone = set()
    while (victim := policy.victim(4, held)) >= 0:
        assert victim in there - held - gone
        policy.remove(victim)
        gone.add(victim)
    assert gone == there - held
    assert policy.victim(4, ()) in held


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_remembers_nothing_of_residency_but_what_it_was_told(name: str) -> None:
    policy = make_policy(name, 2, 8, 16.0)
    for _ in range(40):
        policy.insert(3)
        policy.touch(0, [3], 1)
        policy.remove(3)
    assert policy.victim(0, ()) == -1
    policy.insert(3)
    assert policy.victim(1, ()) == 3


@pytest.mark.parametrize("name", POLICIES)
def test_scores_answer_for_every_expert_and_change_nothing(name: str) -> None:
    policy = make_policy(name, 2, 8, 16.0)
    for _ in range(5):
        policy.touch(0, [1, 2], 1)
        policy.touch(1, [0, 2], 1)
    policy.load(15, 3.0)
    scores = policy.scores()
    assert scores == policy.scores() == [policy.score(e) for e in range(16)]
    assert scores[15] > scores[14]


@pytest.mark.parametrize("name", EVERY)
def test_skewed_traffic_hits_more_than_chance(name: str) -> None:
    assert ratio(cache_of(name), zipf(LAYERS, EXPERTS, K, 200, seed=1)) > 0.45


@pytest.mark.parametrize("name", EVERY)
def test_the_same_routes_give_the_same_decisions(name: str) -> None:
    def decisions() -> list[tuple[int, list[int], list[int]]]:
        cache = cache_of(name, 0.1)
        found = []
        for token in zipf(LAYERS, EXPERTS, K, 60, seed=3):
            for layer, ids in enumerate(token):
                d = cache.route(layer, ids)
                found.append((d.hits, d.fetch, d.evict))
        return found

    assert decisions() == decisions()


@pytest.mark.parametrize("name", ["hybrid", "auto"])
def test_a_prompt_that_touches_all_does_not_wash_out_what_decoding_needs(name: str) -> None:
    cache = cache_of(name)
    tokens = list(zipf(LAYERS, EXPERTS, K, 600, seed=1))
    ratio(cache, tokens[:400])
    before = ratio(cache, tokens[400:500])
    prompt = list(uniform(LAYERS, EXPERTS, K, 512, seed=2))
    for start in range(0, 512, 128):
        for layer in range(LAYERS):
            cache.route(layer, [i for t in prompt[start : start + 128] for i in t[layer]], Phase.PREFILL, 128)
    assert ratio(cache, tokens[500:516]) > 0.9 * before
    assert ratio(cache, tokens[516:600]) > 0.9 * before


@pytest.mark.parametrize("name", ["hybrid", "auto"])
def test_even_traffic_is_no_worse_than_lru(name: str) -> None:
    def under(policy: str) -> float:
        return ratio(cache_of(policy), uniform(LAYERS, EXPERTS, K, 300, seed=3))

    assert under(name) >= under("lru")


@pytest.mark.parametrize("name", ["hybrid", "auto"])
def test_a_hot_set_that_moves_is_followed_within_64_tokens(name: str) -> None:
    cache, fresh = cache_of(name), cache_of(name)
    ratio(cache, zipf(LAYERS, EXPERTS, K, 600, seed=1))
    moved = list(zipf(LAYERS, EXPERTS, K, 128, seed=9))
    ratio(cache, moved[:64])
    ratio(fresh, moved[:64])
    assert ratio(cache, moved[64:]) > 0.9 * ratio(fresh, moved[64:])


@pytest.mark.parametrize("name", ["hybrid", "auto"])
@pytest.mark.parametrize(("slots", "k"), [(15, 1), (12, 4)])
def test_one_more_than_fits_in_turn_still_hits(name: str, slots: int, k: int) -> None:
    cache = ExpertCache([10] * 64, 64, slots * 10, name, n_used=k)
    in_turn = ([[(t * k + i) % (slots + k) for i in range(k)]] for t in range(200))
    assert ratio(cache, in_turn) > 0.4


@pytest.mark.parametrize("name", ["hybrid", "auto"])
def test_a_budget_below_one_tokens_working_set_still_hits(name: str) -> None:
    """Every token uses the same experts, half of which fit: an order of last use would hit none."""
    cache = ExpertCache([10] * (LAYERS * EXPERTS), EXPERTS, LAYERS * K * 10 // 2, name, n_used=K)
    same = [[0, 1, 2, 3]] * LAYERS
    assert ratio(cache, [same] * 100) > 0.35
