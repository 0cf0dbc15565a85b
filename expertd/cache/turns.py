"""Which of the requests that wait goes next: the first one, or one whose experts are in memory already.

Pure. What waits and what is resident is told; the queue is `runtime.admission`'s, what a request needs
`runtime.turns` remembers.

The choice (`choose`):
1. Those behind one that was overtaken too often, or that has waited too long, are out: nobody overtakes it any more.
2. Of the others the one with the largest overlap goes, the earlier of two that are equal.
3. But the first goes, unless that one's overlap is larger by `LEAST_GAIN`: the order of arrival is worth something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Waiting:
    """`overlap`: of the expert uses of the request's last turn, the share whose expert is resident now; None where
    nothing is known of it, which never moves it forward."""

    overlap: float | None
    overtaken: int
    waited_seconds: float


def choose(waiting: Sequence[Waiting], most_overtaken: int, most_seconds: float) -> int:
    """The index of the one that goes; `waiting` is in order of arrival and not empty."""
    first = waiting[0].overlap or 0.0
    best, most = 0, first
    for index, w in enumerate(waiting):
        if w.overlap is not None and w.overlap > most and w.overlap >= first + LEAST_GAIN:
            best, most = index, w.overlap  # 2, 3
        if w.overtaken >= most_overtaken or w.waited_seconds >= most_seconds:
            break  # 1
    return best


def overlap(uses: Mapping[int, int], is_resident: Callable[[int], bool]) -> float | None:
    """The share of the uses, counted by expert, whose expert is resident. None without a use."""
    total = sum(uses.values())
    return sum(n for expert, n in uses.items() if is_resident(expert)) / total if total else None
