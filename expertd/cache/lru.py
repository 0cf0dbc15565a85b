"""Least recently used: the plain order of last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class LruPolicy:
    name = "lru"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        self._n_experts = n_experts
        self._order: OrderedDict[int, None] = OrderedDict()
        self._last = [0] * (n_layers * n_experts)
        self._clock = 0

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        order, last, base = self._order, self._last, layer * self._n_experts
        if n_tokens > 1:
            ids = list(dict.fromkeys(reversed(ids)))
            ids.reverse()
        self._clock += 1
        clock = self._clock
        for i in ids:
            expert = base + i
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

    def scores(self) -> list[float]:
        return [float(t) for t in self._last]

    def load(self, expert: int, score: float) -> None:
        self._last[expert] = int(score)
