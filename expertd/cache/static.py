"""A fixed ranking, as pins from a profile make one: what is hottest in it stays, whatever is routed.

The ranking is what `load` was given. Without any it is counted over the first tokens of each layer and then frozen:
what a profile of the beginning would have said.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush

_COUNTED_TOKENS = 64


class StaticPolicy:
    name = "static"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        self._n_experts = n_experts
        self._scores = [0.0] * (n_layers * n_experts)
        self._counted = [0] * n_layers
        self._loaded = False
        self._resident = bytearray(n_layers * n_experts)
        self._heap: list[tuple[float, int, int]] = []
        """(score, -order of arrival, expert): among equals the last to come goes first, so that some stay."""
        self._arrivals = 0
        self._stale = False

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        if self._loaded or self._counted[layer] >= _COUNTED_TOKENS:
            return
        self._counted[layer] += n_tokens
        base = layer * self._n_experts
        for i in ids:
            self._scores[base + i] += 1.0
        self._stale = True

    def insert(self, expert: int) -> None:
        self._resident[expert] = 1
        self._arrivals += 1
        heappush(self._heap, (self._scores[expert], -self._arrivals, expert))

    def remove(self, expert: int) -> None:
        self._resident[expert] = 0

    def victim(self, layer: int, held: Container[int]) -> int:
        if self._stale or len(self._heap) > 4 * len(self._scores):
            self._rebuild()
        heap, aside, found = self._heap, [], -1
        while heap:
            expert = heap[0][2]
            if not self._resident[expert]:
                heappop(heap)
            elif expert in held:
                aside.append(heappop(heap))
            else:
                found = expert
                break
        for entry in aside:
            heappush(heap, entry)
        return found

    def _rebuild(self) -> None:
        latest = {e: order for _, order, e in sorted(self._heap, reverse=True) if self._resident[e]}
        self._heap = [(self._scores[e], order, e) for e, order in latest.items()]
        heapify(self._heap)
        self._stale = False

    def score(self, expert: int) -> float:
        return self._scores[expert]

    def scores(self) -> list[float]:
        return list(self._scores)

    def load(self, expert: int, score: float) -> None:
        self._loaded = True
        self._scores[expert] = score
        self._stale = True
