"""Which experts are pinned by themselves: the stable hot core of the routing, where there is one. Pure.

Locking what is hot keeps the kernel's reclaim and a long prompt off it. It pays only where routing is skewed: under
even traffic every expert is as good as another, and a lock would take memory from what is needed next.

`AutoPins.step`, on the routes of two windows that follow each other:
1. After pins were taken back under pressure: nothing for a while.
2. Layers seen too little keep what they have; the others' experts get a chance of use a token in each window.
3. An expert is core when its lesser chance is `ENTER` times that of even routing; it stays core down to `LEAVE` times
   by its greater chance, so that nothing flutters.
4. A core that takes less than `WORTH` of all requests is not worth its locks: none is.
5. Hottest first, as many as the limit and half the budget hold.

Not here: locking (`actions`), the limit under pressure (`pages.budget`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertd.types import ExpertLayout, Phase

WINDOW_TOKENS = 256
_LEAST_ROUTES = 48
"""Tokens of a layer in each window below which its figures say nothing."""
ENTER, LEAVE = 4.0, 2.0
WORTH = 0.10
_HOLD_OFF_STEPS = 4
_BUDGET_SHARE = 0.5


class RouteWindow:
    """Counts routes by expert id. `observe` is the engine thread's, `take` anybody's."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._n_ids = layout.n_layers * layout.n_experts
        self._n_experts = layout.n_experts
        self._first = layout.layers[0].layer
        self._k = max(1, layout.n_experts_used)
        self.counts = [0] * self._n_ids
        self.tokens = 0

    def observe(self, layer: int, ids: Sequence[int], phase: Phase) -> None:
        counts, base = self.counts, layer * self._n_experts
        for i in ids:
            counts[base + i] += 1
        if layer == self._first:
            self.tokens += len(ids) // self._k or 1

    def take(self) -> list[int]:
        """The counts since the last time, and a fresh start."""
        counts, self.counts, self.tokens = self.counts, [0] * self._n_ids, 0
        return counts


@dataclass(frozen=True, slots=True)
class Pins:
    """What to lock and what to give up, hottest first; `why` says it in a sentence."""

    pin: tuple[int, ...] = ()
    unpin: tuple[int, ...] = ()
    why: str = ""


class AutoPins:
    """One thread. `held` are the experts pinned by this."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._k = max(1, layout.n_experts_used)
        self.held: set[int] = set()
        self.why = "too little was routed to say"
        self._before: list[float | None] | None = None
        self._hold_off = 0

    def taken_back(self, experts: Sequence[int]) -> None:
        """Pins were given up under pressure, or refused."""
        self.held.difference_update(experts)
        self._hold_off = _HOLD_OFF_STEPS

    def step(self, counts: Sequence[int], budget_bytes: int, limit_bytes: int) -> Pins:
        """The routes of one more window; `limit_bytes` bounds these pins."""
        now, before = self._chances(counts), self._before
        self._before = now
        if self._hold_off:  # 1
            self._hold_off -= 1
            self.why = "pins were given up lately: memory is short"
            return Pins(why=self.why)
        if before is None:
            return Pins(why=self.why)
        core = self._core(before, now)
        room = min(limit_bytes, int(_BUDGET_SHARE * budget_bytes))
        chosen = self._fitting(core, room)
        pins = Pins(
            tuple(e for e in chosen if e not in self.held), tuple(sorted(self.held.difference(chosen))), self.why
        )
        self.held = set(chosen)
        return pins

    def _chances(self, counts: Sequence[int]) -> list[float | None]:
        """Number 2; None where a layer was seen too little."""
        n = self._layout.n_experts
        found: list[float | None] = [None] * len(counts)
        for moe in self._layout.layers:
            first = moe.layer * n
            row = counts[first : first + moe.n_experts]
            total = sum(row)
            if total >= _LEAST_ROUTES * self._k:
                found[first : first + moe.n_experts] = [self._k * c / total for c in row]
        return found

    def _core(self, before: list[float | None], now: list[float | None]) -> list[int]:
        """Numbers 3 and 4, hottest first."""
        stable: list[tuple[float, int]] = []
        taken = asked = 0.0
        for moe in self._layout.layers:
            even = self._k / moe.n_experts
            first = moe.layer * self._layout.n_experts
            for expert in range(first, first + moe.n_experts):
                a, b = before[expert], now[expert]
                if a is None or b is None:
                    if expert in self.held:
                        stable.append((even * ENTER, expert))
                    continue
                asked += b
                enters = min(a, b) >= min(ENTER * even, 0.9)
                if enters or (expert in self.held and max(a, b) >= LEAVE * even):
                    stable.append((min(a, b), expert))
                    taken += b
        share = taken / asked if asked else 0.0
        if asked and share < WORTH:
            self.why = f"routing is too even to pin: its stable core takes {100 * share:.0f} % of the requests"
            return []
        if asked:
            self.why = f"{len(stable)} experts take {100 * share:.0f} % of the requests, steadily"
        return [expert for _, expert in sorted(stable, key=lambda x: (-x[0], x[1]))]

    def _fitting(self, core: Sequence[int], room: int) -> list[int]:
        """Number 5."""
        sizes, chosen = self._layout.expert_sizes, []
        for expert in core:
            room -= sizes[expert]
            if room < 0:
                break
            chosen.append(expert)
        return chosen
