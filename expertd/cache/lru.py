"""Least recently used: the plain order of last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from expertd.types import Phase


class LruPolicy:
    name = "lru"

    def __init__(self, n_ids: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._last = [0] * n_ids
        self._clock = 0

    def touch(self, layer: int, experts: Sequence[int], counts: Sequence[int] | None, phase: Phase) -> None:
        self._clock += 1
        order, last, clock = self._order, self._last, self._clock
        for expert in experts:
            last[expert] = clock
            if expert in order:
                order.move_to_end(expert)

    def insert(self, expert: int) -> None:
        self._order[expert] = None

    def remove(self, expert: int) -> None:
        self._order.pop(expert, None)

    def victim(self, layer: int, held: Container[int]) -> int:
        for expert in self._order:
            if expert not in held:
                return expert
        return -1

    def score(self, expert: int) -> float:
        return float(self._last[expert])

    def load(self, expert: int, score: float) -> None:
        self._last[expert] = int(score)
