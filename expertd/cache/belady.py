"""Belady's bound: evict what is needed again last. It knows the whole trace beforehand, so it is for replay alone.

The bound holds for experts of one size; where sizes differ it is a good estimate of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def misses(wanted: Sequence[Sequence[int]], sizes: Sequence[int], budget_bytes: int) -> list[list[int]]:
    """Experts to read, by route. `wanted` are the distinct expert ids that each route needs at once, `sizes` the bytes
    by expert id. What does not fit beside the others of its route is read and not kept."""
    next_use = [len(wanted)] * len(sizes)
    heap: list[tuple[int, int]] = []
    """(-next use, expert): the furthest first; entries that are not an expert's present next use are stale."""
    resident: set[int] = set()
    used_bytes = 0
    found = []
    for experts, later in zip(wanted, _following(wanted, len(sizes)), strict=True):
        missing = [e for e in experts if e not in resident]
        used_bytes += sum(sizes[e] for e in missing)
        resident.update(missing)
        needed = set(experts)
        while used_bytes > budget_bytes and heap:
            key, expert = heappop(heap)
            if expert in resident and expert not in needed and next_use[expert] == -key:
                resident.discard(expert)
                used_bytes -= sizes[expert]
        for expert in reversed(missing):
            if used_bytes <= budget_bytes:
                break
            resident.discard(expert)
            used_bytes -= sizes[expert]
        for expert, at in zip(experts, later, strict=True):
            next_use[expert] = at
            if expert in resident:
                heappush(heap, (-at, expert))
        found.append(missing)
    return found


def _following(wanted: Sequence[Sequence[int]], n_ids: int) -> list[list[int]]:
    """By route, the number of the next route that wants each of its experts."""
    soonest = [len(wanted)] * n_ids
    following: list[list[int]] = [[] for _ in wanted]
    for at in range(len(wanted) - 1, -1, -1):
        following[at] = [soonest[e] for e in wanted[at]]
        for expert in wanted[at]:
            soonest[expert] = at
    return following
