"""Decayed frequency: an expert's score is the sum over its uses of 2^(-age / half-life), age in tokens of its layer.

Recency is in it: of two experts used equally often the later one leads. Instead of shrinking all scores with every
token, what a use counts grows; scores are scaled back before a float runs out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush, heapreplace

_RESCALE_AT = 1e100
_MOST_HALF_LIVES = 64
"""A prompt's batch decays by so many half-lives at most: nothing is left anyway, and the weights stay finite."""

Entry = tuple[float, int]


class LfuPolicy:
    name = "lfu"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        self._n_layers, self._n_experts = n_layers, n_experts
        self._half_life = half_life
        self._growth = 2.0 ** (1.0 / half_life)
        self._scores = [0.0] * (n_layers * n_experts)
        self._weights = [1.0] * n_layers
        """What a use counts now, by layer."""
        self._resident = bytearray(n_layers * n_experts)
        self._heaps: list[list[Entry]] = [[] for _ in range(n_layers)]
        """Residents by score as it was when last looked at: scores only grow, so a stale top is pushed back."""

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        scores, weight = self._scores, self._weights[layer]
        base = layer * self._n_experts
        if n_tokens == 1:
            weight *= self._growth
            for i in ids:
                scores[base + i] += weight
        else:
            k = len(ids) // n_tokens
            most = int(_MOST_HALF_LIVES * self._half_life)
            ids = ids[-most * k :]
            for start in range(0, len(ids), k):
                weight *= self._growth
                for i in ids[start : start + k]:
                    scores[base + i] += weight
        self._weights[layer] = weight
        if weight > _RESCALE_AT:
            self._rescale(layer)

    def _rescale(self, layer: int) -> None:
        first = layer * self._n_experts
        factor = 1.0 / self._weights[layer]
        for expert in range(first, first + self._n_experts):
            self._scores[expert] *= factor
        self._weights[layer] = 1.0
        self._rebuild(layer)

    def _rebuild(self, layer: int) -> None:
        first = layer * self._n_experts
        experts = range(first, first + self._n_experts)
        self._heaps[layer] = [(self._scores[e], e) for e in experts if self._resident[e]]
        heapify(self._heaps[layer])

    def insert(self, expert: int) -> None:
        self._resident[expert] = 1
        heap = self._heaps[expert // self._n_experts]
        heappush(heap, (self._scores[expert], expert))
        if len(heap) > 2 * self._n_experts:
            self._rebuild(expert // self._n_experts)

    def remove(self, expert: int) -> None:
        self._resident[expert] = 0

    def victim(self, layer: int, held: Container[int]) -> int:
        best, found = 0.0, -1
        for other in range(self._n_layers):
            top = self._top(other, held)
            if top is not None:
                score = top[0] / self._weights[other]
                if found < 0 or score < best:
                    best, found = score, top[1]
        return found

    def _top(self, layer: int, held: Container[int]) -> Entry | None:
        """The coldest resident of a layer that is not held; entries of experts that went are cleared away."""
        heap, resident, scores = self._heaps[layer], self._resident, self._scores
        aside: list[Entry] = []
        found: Entry | None = None
        while heap:
            key, expert = heap[0]
            if not resident[expert]:
                heappop(heap)
            elif scores[expert] != key:
                heapreplace(heap, (scores[expert], expert))
            elif expert in held:
                aside.append(heappop(heap))
            else:
                found = heap[0]
                break
        for entry in aside:
            heappush(heap, entry)
        return found

    def score(self, expert: int) -> float:
        return self._scores[expert] / self._weights[expert // self._n_experts]

    def scores(self) -> list[float]:
        n = self._n_experts
        return [s / self._weights[e // n] for e, s in enumerate(self._scores)]

    def load(self, expert: int, score: float) -> None:
        layer = expert // self._n_experts
        self._scores[expert] = score * self._weights[layer]
        if self._resident[expert]:
            self._rebuild(layer)
