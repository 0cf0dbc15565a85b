"""`auto`: who is in charge, and when that changes."""

from __future__ import annotations

import random
from typing import cast

import pytest

from expertd.cache.auto import AutoPolicy
from expertd.cache.expert_cache import ExpertCache
from expertd.cache.policy import make_policy
from expertd.cache.shadow import Shadows

LAYERS, EXPERTS = 2, 16


class Told:
    """Shadows whose ratios are told."""

    def __init__(self, **ratios: float) -> None:
        self.ratios = ratios
        self.recent_requests = 1e6

    def recent(self) -> dict[str, float]:
        return self.ratios


def auto(told: Told) -> AutoPolicy:
    return AutoPolicy(LAYERS, EXPERTS, 16.0, lambda name: make_policy(name, LAYERS, EXPERTS, 16.0), cast(Shadows, told))


def judge(policy: AutoPolicy, steps: range) -> None:
    for step in steps:
        policy.judge(step)


def test_another_takes_over_only_with_a_lead_that_lasts() -> None:
    told = Told(hybrid=0.50, lfu=0.50, lru=0.53)
    policy = auto(told)
    assert policy.name == "auto (hybrid)"
    judge(policy, range(1, 65))
    told.ratios["lru"] = 0.51
    judge(policy, range(65, 97))
    told.ratios["lru"] = 0.53
    judge(policy, range(97, 161))
    assert policy.switches == 0
    judge(policy, range(161, 193))
    assert policy.name == "auto (lru)"
    assert policy.switches == 1


def test_too_few_requests_decide_nothing() -> None:
    told = Told(hybrid=0.1, lfu=0.2, lru=0.9)
    told.recent_requests = 100.0
    policy = auto(told)
    judge(policy, range(1, 200))
    assert policy.switches == 0


def test_what_is_resident_stays_known_through_changes() -> None:
    told = Told(hybrid=0.1, lfu=0.1, lru=0.9)
    policy = auto(told)
    for i in range(6):
        policy.touch(0, [i], 1)
        policy.insert(i)
    policy.remove(3)
    judge(policy, range(1, 128))
    assert policy.name == "auto (lru)"
    policy.touch(0, [0], 1)
    told.ratios.update(hybrid=0.99)
    judge(policy, range(128, 256))
    assert policy.name == "auto (hybrid)"
    gone = []
    while (victim := policy.victim(1, ())) >= 0:
        policy.remove(victim)
        gone.append(victim)
    assert sorted(gone) == [0, 1, 2, 4, 5]


def test_shadows_count_and_the_cache_tells() -> None:
    rng = random.Random(5)
    cache = ExpertCache([10] * (LAYERS * EXPERTS), EXPERTS, LAYERS * EXPERTS * 10 // 2)
    for _ in range(50):
        for layer in range(LAYERS):
            cache.route(layer, rng.sample(range(EXPERTS), 4))
    assert cache.shadow_requests == 50 * LAYERS * 4
    assert set(cache.shadow_hits) == {"hybrid", "lfu", "lru"}
    assert all(0 < hits < cache.shadow_requests for hits in cache.shadow_hits.values())
    assert cache.policy_name == "auto (hybrid)"
    cache.resize(10)
    cache.route(0, [1])


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_nothing_is_tried_where_everything_fits(policy: str) -> None:
    cache = ExpertCache([10] * (LAYERS * EXPERTS), EXPERTS, 10**6, policy)
    cache.route(0, [1, 2])
    assert cache.shadow_requests == 0
    assert cache.policy_switches == 0
