"""Decayed frequency by the layer's own clock, weighed by how soon the layer comes round again: the default.

An expert's score is the sum over its uses of 2^(-age / half-life), age in tokens of its layer. Recency is in it: of two
experts used equally often the later one leads. Layers are visited in turn, so an expert of a layer just passed cannot
be needed for a whole token: the value that is compared is `p / (1 + p * d)` with `p` the chance of use in a token and
`d` the share of a token until the layer's next turn.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from expertd.types import Phase

_RESCALE_AT = 1e200


class HybridPolicy:
    name = "hybrid"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        self._n_layers, self._n_experts = n_layers, n_experts
        self._growth = 2.0 ** (1.0 / half_life)
        self._rate = 1.0 - 1.0 / self._growth
        self._scores = [0.0] * (n_layers * n_experts)
        self._weights = [1.0] * n_layers
        """What a use counts now, by layer: grows instead of all scores shrinking."""
        self._resident = bytearray(n_layers * n_experts)
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(n_layers)]
        """Resident experts by score as it was when last looked at: scores only grow, so a stale top is pushed back."""

    def touch(self, layer: int, experts: Sequence[int], counts: Sequence[int] | None, phase: Phase) -> None:
        weight = self._weights[layer] * self._growth
        scores = self._scores
        if counts is None:
            for expert in experts:
                scores[expert] += weight
        else:
            for expert, count in zip(experts, counts, strict=True):
                scores[expert] += weight * count
        self._weights[layer] = weight
        if weight > _RESCALE_AT:
            self._rescale(layer)

    def _rescale(self, layer: int) -> None:
        first = layer * self._n_experts
        factor = 1.0 / self._weights[layer]
        for expert in range(first, first + self._n_experts):
            self._scores[expert] *= factor
        self._weights[layer] = 1.0
        self._heaps[layer] = [
            (self._scores[e], e) for e in range(first, first + self._n_experts) if self._resident[e]
        ]
        heapify(self._heaps[layer])

    def insert(self, expert: int) -> None:
        self._resident[expert] = 1
        heappush(self._heaps[expert // self._n_experts], (self._scores[expert], expert))

    def remove(self, expert: int) -> None:
        self._resident[expert] = 0

    def victim(self, layer: int, held: Container[int]) -> int:
        n_layers, rate, best, found = self._n_layers, self._rate, 2.0, -1
        for other in range(n_layers):
            top = self._top(other) if other != layer else self._top_unheld(layer, held)
            if top is None:
                continue
            p = top[0] / self._weights[other] * rate
            ahead = (other - layer) % n_layers or n_layers
            value = p / (1.0 + p * ahead / n_layers)
            if value < best or found < 0:
                best, found = value, top[1]
        return found

    def _top(self, layer: int) -> tuple[float, int] | None:
        heap, resident, scores = self._heaps[layer], self._resident, self._scores
        while heap:
            key, expert = heap[0]
            if not resident[expert]:
                heappop(heap)
            elif scores[expert] != key:
                heapreplace(heap, (scores[expert], expert))
            else:
                return heap[0]
        return None

    def _top_unheld(self, layer: int, held: Container[int]) -> tuple[float, int] | None:
        aside: list[tuple[float, int]] = []
        top = self._top(layer)
        while top is not None and top[1] in held:
            aside.append(heappop(self._heaps[layer]))
            top = self._top(layer)
        for entry in aside:
            heappush(self._heaps[layer], entry)
        return top

    def score(self, expert: int) -> float:
        return self._scores[expert] / self._weights[expert // self._n_experts]

    def load(self, expert: int, score: float) -> None:
        self._scores[expert] = score * self._weights[expert // self._n_experts]
