"""The policy that follows whichever does best of late, by shadow caches: `hybrid` until another proves better.

1. The shadows see the first `_CYCLE` steps whole, then a part of each such cycle, since they cost time. Every
   `_CHECK_STEPS` steps of those their hit ratios are compared.
2. A policy that leads the one in charge by `_LEAD` or more takes over at the `_IN_A_ROW`th such check in a row: a few
   sampled layers are a good deal of luck.
3. The new one starts from what is resident, in the order of last use, and from the scores that `hybrid` goes on
   keeping.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from expertd.cache.hybrid import HybridPolicy
from expertd.cache.policy import Policy
from expertd.cache.shadow import Shadows

CANDIDATES = ("hybrid", "lfu", "lru")
_CYCLE = 512
_WATCHED = 128
_CHECK_STEPS = 32
_LEAD = 0.02
_IN_A_ROW = 3
_LEAST_REQUESTS = 1024
"""Sampled requests below which nothing is decided."""


class AutoPolicy:
    """`make` builds a policy by name. `judge` is called by the cache when a step begins."""

    def __init__(
        self, n_layers: int, n_experts: int, half_life: float, make: Callable[[str], Policy], shadows: Shadows
    ) -> None:
        self._n_experts = n_experts
        self._make, self.shadows = make, shadows
        self._keeper = HybridPolicy(n_layers, n_experts, half_life)
        self._active: Policy = self._keeper
        self._resident: dict[int, None] = {}
        self.watching = True
        """Whether the shadows see this step."""
        self._leader = ""
        self._led = 0
        """Checks in a row at which `_leader` led."""
        self.switches = 0

    @property
    def name(self) -> str:
        return f"auto ({self._active.name})"

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        self._keeper.touch(layer, ids, n_tokens)
        if self._active is not self._keeper:
            self._active.touch(layer, ids, n_tokens)

    def insert(self, expert: int) -> None:
        self._resident[expert] = None
        self._active.insert(expert)

    def remove(self, expert: int) -> None:
        self._resident.pop(expert, None)
        self._active.remove(expert)

    def victim(self, layer: int, held: Container[int]) -> int:
        return self._active.victim(layer, held)

    def score(self, expert: int) -> float:
        return self._keeper.score(expert)

    def scores(self) -> list[float]:
        return self._keeper.scores()

    def load(self, expert: int, score: float) -> None:
        self._keeper.load(expert, score)
        if self._active is not self._keeper:
            self._active.load(expert, score)

    def judge(self, step: int) -> None:
        """A step begins."""
        self.watching = step < _CYCLE or step % _CYCLE < _WATCHED
        if not self.watching or step % _CHECK_STEPS or self.shadows.recent_requests < _LEAST_REQUESTS:
            return
        ratios = self.shadows.recent()  # 1
        best = max(CANDIDATES, key=lambda name: ratios[name])
        if best == self._active.name or ratios[best] < ratios[self._active.name] + _LEAD:
            self._leader, self._led = "", 0
            return
        self._led = self._led + 1 if best == self._leader else 1
        self._leader = best
        if self._led >= _IN_A_ROW:
            self._take_over(best)  # 2

    def _take_over(self, name: str) -> None:
        """Case 3."""
        for expert in self._resident:
            self._active.remove(expert)
        chosen = self._keeper if name == self._keeper.name else self._make(name)
        age = self._keeper.age
        residents = sorted(self._resident, key=lambda e: (-age(e), e))
        for expert in residents:
            if chosen is not self._keeper:
                chosen.load(expert, self._keeper.score(expert))
            chosen.insert(expert)
        self._active, self._leader, self._led = chosen, "", 0
        self.switches += 1
