"""What a decision of the cache costs: `python -m expertd.bench.cache_cost --policy auto` (and pyperf's options).

48 layers of 128 experts, 8 of them a token, a quarter resident, after some skewed traffic with a fixed seed. `all-hit`
is one layer whose experts are all resident, `one-miss` one layer that misses one and evicts one. `auto` works more in
some tokens than in others: a loop is 512 of them. Needs pyperf (the extra `dev`).
"""

from __future__ import annotations

import argparse
import random
from functools import lru_cache
from typing import Any

from expertd.cache.expert_cache import ExpertCache

_LAYERS, _EXPERTS, _USED = 48, 128, 8
_NBYTES = 3_000_000
_TOKENS = 512
_WARM_TOKENS = 1024


@lru_cache(maxsize=1)
def _traffic() -> list[list[list[int]]]:
    rng = random.Random(1)
    order = [rng.sample(range(_EXPERTS), _EXPERTS) for _ in range(_LAYERS)]
    weights = [1.0 / (rank + 1) ** 0.9 for rank in range(_EXPERTS)]
    return [[_draw(rng, ranked, weights) for ranked in order] for _ in range(_WARM_TOKENS)]


def _warm(policy: str) -> tuple[ExpertCache, list[list[int]]]:
    """A cache in the middle of its work, and the token it saw last."""
    n = _LAYERS * _EXPERTS
    cache = ExpertCache([_NBYTES] * n, _EXPERTS, n // 4 * _NBYTES, policy, n_used=_USED)
    for token in _traffic():
        for layer, ids in enumerate(token):
            cache.route(layer, ids)
    return cache, _traffic()[-1]


def _draw(rng: random.Random, ranked: list[int], weights: list[float]) -> list[int]:
    chosen: dict[int, None] = {}
    while len(chosen) < _USED:
        chosen[ranked[rng.choices(range(_EXPERTS), weights)[0]]] = None
    return list(chosen)


def _all_hit(loops: int, policy: str) -> float:
    from pyperf import perf_counter

    cache, token = _warm(policy)
    for _ in range(2):
        for layer, ids in enumerate(token):
            cache.route(layer, ids)
    route = cache.route
    began = perf_counter()
    for _ in range(_TOKENS * loops):
        for layer, ids in enumerate(token):
            route(layer, ids)
    return float(perf_counter() - began)


def _one_miss(loops: int, policy: str) -> float:
    from pyperf import perf_counter

    cache, token = _warm(policy)
    total = 0.0
    for turn in range(_TOKENS * loops):
        for layer in range(_LAYERS):
            base = layer * _EXPERTS
            hot = [i for i in token[layer] if cache.is_resident(base + i)][: _USED - 1]
            hot += [i for i in range(_EXPERTS) if cache.is_resident(base + i) and i not in hot][: _USED - 1 - len(hot)]
            absent = next(i % _EXPERTS for i in range(7 * turn, 10**9) if not cache.is_resident(base + i % _EXPERTS))
            ids = [*hot, absent]
            began = perf_counter()
            cache.route(layer, ids)
            total += perf_counter() - began
    return total


def main() -> None:
    import pyperf

    def pass_on(command: list[str], args: Any) -> None:
        command.extend(("--policy", args.policy))

    runner = pyperf.Runner(
        add_cmdline_args=pass_on, _argparser=argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    )
    runner.argparser.add_argument("--policy", default="auto")
    policy = runner.parse_args().policy
    runner.bench_time_func(f"all-hit {policy}", _all_hit, policy, inner_loops=_TOKENS * _LAYERS)
    runner.bench_time_func(f"one-miss {policy}", _one_miss, policy, inner_loops=_TOKENS * _LAYERS)


if __name__ == "__main__":
    main()
