"""SIEVE: first in, first out, with a second chance. After Zhang and others, "SIEVE is Simpler than LRU", NSDI 2024.

A hand moves from the oldest entry to the newest: an entry used since the hand last passed is spared once, the first
that was not used goes. Nothing moves on a hit, and one-time visitors leave early.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

_NONE = -1


class SievePolicy:
    name = "sieve"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        n = n_layers * n_experts
        self._n_experts = n_experts
        self._newer, self._older = [_NONE] * n, [_NONE] * n
        self._newest = self._oldest = self._hand = _NONE
        self._used = bytearray(n)
        self._resident = bytearray(n)
        self._count = 0
        self._uses = [0] * n

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        base, used, resident, uses = layer * self._n_experts, self._used, self._resident, self._uses
        for i in ids:
            expert = base + i
            uses[expert] += 1
            if resident[expert]:
                used[expert] = 1

    def insert(self, expert: int) -> None:
        self._used[expert] = 0
        self._resident[expert] = 1
        self._count += 1
        self._older[expert], self._newer[expert] = self._newest, _NONE
        if self._newest != _NONE:
            self._newer[self._newest] = expert
        else:
            self._oldest = expert
        self._newest = expert

    def remove(self, expert: int) -> None:
        if not self._resident[expert]:
            return
        self._resident[expert] = 0
        self._count -= 1
        newer, older = self._newer[expert], self._older[expert]
        if self._hand == expert:
            self._hand = newer
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._newest = older
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._oldest = newer

    def victim(self, layer: int, held: Container[int]) -> int:
        at, used = self._hand, self._used
        for _ in range(2 * self._count):
            if at == _NONE:
                at = self._oldest
            if used[at]:
                used[at] = 0
            elif at not in held:
                self._hand = at
                return at
            at = self._newer[at]
        return _NONE

    def score(self, expert: int) -> float:
        return float(self._uses[expert])

    def scores(self) -> list[float]:
        return [float(n) for n in self._uses]

    def load(self, expert: int, score: float) -> None:
        self._uses[expert] = int(score)
