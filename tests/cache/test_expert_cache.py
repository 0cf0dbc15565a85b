"""The cache's promises on small cases; random sequences are in test_expert_cache_stateful.py."""

from __future__ import annotations

import pytest

from expertd.cache.expert_cache import ExpertCache
from expertd.errors import UsageError
from expertd.types import Phase


def cache_of(n_layers: int, n_experts: int, slots: int, policy: str = "hybrid") -> ExpertCache:
    return ExpertCache([10] * (n_layers * n_experts), n_experts, slots * 10, policy)


@pytest.mark.parametrize("policy", ["lru", "hybrid", "auto"])
def test_a_routed_expert_is_fetched_once_and_hits_after(policy: str) -> None:
    cache = cache_of(2, 8, 4, policy)
    first = cache.route(0, [3, 1])
    assert (first.hits, first.fetch, first.evict) == (0, [1, 3], [])
    assert cache.route(1, [3]).fetch == [11]
    again = cache.route(0, [1, 3])
    assert (again.hits, again.fetch, again.evict) == (2, [], [])
    assert cache.resident() == [1, 3, 11]
    assert cache.resident_bytes == 30
    assert cache.steps == 2


def test_ids_out_of_range_are_dropped_and_counted() -> None:
    cache = cache_of(2, 8, 4)
    assert cache.route(0, [8, -1, 2]).fetch == [2]
    assert cache.route(7, [1]).fetch == []
    assert cache.counters.out_of_range == 3


def test_a_layer_larger_than_the_budget_is_transient_and_leaves_at_the_next() -> None:
    cache = cache_of(2, 8, 2)
    first = cache.route(0, [0, 1, 2, 3])
    assert first.fetch == [0, 1, 2, 3]
    assert cache.resident_bytes == 20
    assert cache.transient_bytes == 20
    assert set(cache.route(1, [0]).evict) >= {2, 3}
    assert cache.transient_bytes == 0


def test_pins_stay_until_the_budget_falls_below_them() -> None:
    cache = cache_of(1, 16, 4)
    assert cache.pin([5, 6]).fetch == [5, 6]
    for i in range(16):
        cache.route(0, [i])
    assert cache.is_pinned(5)
    assert cache.is_pinned(6)
    assert cache.pinned_bytes == 20
    shrunk = cache.resize(10)
    assert len(shrunk.unpin) == 1
    assert cache.resident_bytes == 10
    assert cache.unpin() == cache.resident()
    assert cache.pinned_bytes == 0


def test_a_prediction_never_evicts_something_hotter() -> None:
    cache = cache_of(1, 8, 2)
    cache.route(0, [0, 1])
    assert cache.predict([4, 5]).fetch == []
    cache.drop([1])
    assert cache.predict([4, 5]).fetch == [4]
    assert cache.route(0, [4]).hits == 1
    assert cache.counters.predicted_used == 1


def test_what_is_as_good_as_certain_gets_room_but_never_that_of_the_layer_at_hand() -> None:
    cache = cache_of(3, 4, 6)
    for _ in range(3):
        cache.route(0, [0, 1])
        cache.route(1, [0, 1])
    cache.pin([0])
    cache.route(1, [2, 3])
    busy = [4, 5, 6, 7]
    ahead = cache.expect([8, 9, 10, 11], busy)
    assert ahead.evict == [1]
    assert ahead.fetch == [8]
    assert all(cache.is_resident(e) for e in (0, *busy))
    assert cache.resident_bytes <= cache.budget_bytes
    assert cache.expect([8], busy).fetch == []
    assert cache.route(2, [0, 1]).hits == 1
    assert (cache.counters.predicted, cache.counters.predicted_used) == (1, 1)


def test_a_prompt_batch_counts_an_expert_once() -> None:
    cache = cache_of(1, 8, 8)
    assert cache.route(0, [1, 1, 2, 1, 2, 7], Phase.PREFILL).fetch == [1, 2, 7]
    assert cache.counters.requests == 3


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UsageError, match="nosuch"):
        cache_of(1, 8, 2, "nosuch")
