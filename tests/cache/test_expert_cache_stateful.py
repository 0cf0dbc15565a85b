"""The cache's invariants under any series of calls, checked against a plain model of what is resident."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertd.cache.decision import Decision
from expertd.cache.expert_cache import ExpertCache
from expertd.cache.policy import POLICIES
from expertd.types import Phase

LAYERS, EXPERTS = 3, 6
MISSING = {0 * EXPERTS + 5}
"""The first layer has one expert less."""
SIZES = [0 if e in MISSING else 10 + e // EXPERTS for e in range(LAYERS * EXPERTS)]
EXPERT_IDS = st.lists(st.integers(-2, LAYERS * EXPERTS + 1), max_size=6)


class CacheMachine(RuleBasedStateMachine):
    """`policy` is set by the test."""

    policy = "hybrid"

    @initialize(budget=st.integers(0, 200))
    def begin(self, budget: int) -> None:
        self.cache = ExpertCache(SIZES, EXPERTS, budget, self.policy)
        self.there: set[int] = set()
        self.calls: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = []
        self.first_budget = budget

    def _call(self, name: str, *args: Any) -> Decision:
        decision: Decision = getattr(self.cache, name)(*args)
        self.calls.append((name, args, (decision.hits, decision.fetch, decision.evict, decision.unpin)))
        fetch, evict = set(decision.fetch), set(decision.evict)
        assert len(fetch) == len(decision.fetch)
        assert len(evict) == len(decision.evict)
        assert not fetch & evict
        assert not fetch & self.there
        assert evict <= self.there
        assert list(decision.fetch) == sorted(decision.fetch)
        self.there = (self.there | fetch) - evict
        return decision

    @rule(layer=st.integers(0, LAYERS - 1), ids=st.lists(st.integers(-1, EXPERTS), min_size=0, max_size=4, unique=True))
    def decode(self, layer: int, ids: list[int]) -> None:
        self._routed(layer, ids, Phase.DECODE, None)

    @rule(layer=st.integers(0, LAYERS - 1), ids=st.lists(st.integers(-1, EXPERTS), max_size=24), told=st.booleans())
    def prompt(self, layer: int, ids: list[int], told: bool) -> None:
        self._routed(layer, ids, Phase.PREFILL, max(1, len(ids) // 2) if told else None)

    def _routed(self, layer: int, ids: list[int], phase: Phase, n_tokens: int | None) -> None:
        wanted = {layer * EXPERTS + i for i in ids if 0 <= i < EXPERTS} - MISSING
        pinned, before = set(self.cache.pinned()), set(self.there)
        absent = self.cache.absent(layer, ids)
        decision = self._call("route", layer, ids, phase, n_tokens)
        assert absent == list(decision.fetch)
        assert set(decision.fetch) == wanted - before
        assert decision.hits == len(wanted & before)
        assert wanted <= self.there
        assert pinned == set(self.cache.pinned())

    @rule(experts=EXPERT_IDS)
    def predict(self, experts: list[int]) -> None:
        scores = self.cache.scores()
        pinned = set(self.cache.pinned())
        decision = self._call("predict", experts)
        assert not pinned & set(decision.evict)
        if decision.evict:
            assert max(scores[e] for e in decision.evict) < max(scores[e] for e in decision.fetch)

    @rule(experts=EXPERT_IDS, busy=EXPERT_IDS)
    def expect(self, experts: list[int], busy: list[int]) -> None:
        kept = {*self.cache.pinned(), *experts, *busy}
        assert not kept & set(self._call("expect", experts, busy).evict)

    @rule(experts=EXPERT_IDS)
    def admit(self, experts: list[int]) -> None:
        assert not set(self.cache.pinned()) & set(self._call("admit", experts).evict)

    @rule(experts=EXPERT_IDS)
    def pin(self, experts: list[int]) -> None:
        before = set(self.cache.pinned())
        decision = self._call("pin", experts)
        assert not before & set(decision.evict)
        assert before <= set(self.cache.pinned())

    @rule(experts=st.none() | EXPERT_IDS)
    def unpin(self, experts: list[int] | None) -> None:
        pinned = set(self.cache.pinned())
        given_up = self.cache.unpin(experts)
        self.calls.append(("unpin", (experts,), tuple(given_up)))
        assert set(given_up) == (pinned if experts is None else pinned & set(experts))

    @rule(budget=st.integers(0, 250))
    def resize(self, budget: int) -> None:
        pinned = set(self.cache.pinned())
        decision = self._call("resize", budget)
        assert set(decision.unpin) == pinned - set(self.cache.pinned())
        assert set(decision.unpin) <= set(decision.evict)
        if sum(SIZES[e] for e in pinned) <= budget:
            assert not decision.unpin

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.there)), max_size=3))
        resident = {e for e in chosen if self.cache.is_resident(e)}
        self.cache.drop(chosen)
        self.calls.append(("drop", (chosen,), ()))
        self.there -= resident

    @rule(experts=EXPERT_IDS)
    def evict(self, experts: list[int]) -> None:
        gone = self.cache.evict(experts)
        self.calls.append(("evict", (experts,), tuple(gone)))
        assert set(gone) <= self.there
        self.there -= set(gone)

    @invariant()
    def bytes_are_what_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        resident = set(cache.resident())
        assert resident <= self.there
        assert cache.resident_bytes == sum(SIZES[e] for e in resident)
        assert cache.resident_bytes <= cache.budget_bytes
        assert cache.transient_bytes == sum(SIZES[e] for e in self.there - resident)
        assert cache.pinned_bytes == sum(SIZES[e] for e in cache.pinned())
        assert set(cache.pinned()) <= resident
        c = cache.counters
        assert c.requests == sum(c.layer_hits) + sum(c.layer_misses)
        assert c.hits == sum(c.layer_hits)
        assert 0 <= c.predicted_used + c.predicted_wasted <= c.predicted

    def teardown(self) -> None:
        """The same calls on a new cache give the same answers."""
        if not hasattr(self, "cache"):
            return
        again = ExpertCache(SIZES, EXPERTS, self.first_budget, self.policy)
        for name, args, told in self.calls:
            found = getattr(again, name)(*args)
            if isinstance(found, Decision):
                assert (found.hits, found.fetch, found.evict, found.unpin) == told
            else:
                assert tuple(found or ()) == told


@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_invariants_hold(policy: str) -> None:
    machine = type(f"CacheMachine_{policy}", (CacheMachine,), {"policy": policy})
    test_case = machine.TestCase  # type: ignore[attr-defined]
    test_case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    test_case("runTest").runTest()
