"""What the cache tells its caller to do, as data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Decision:
    """What follows from one route (or one speculation, adoption, pin, change of budget).

    `fetch` and `evict` are expert ids, `fetch` ascending, nothing in both. Evict first or at the same time: the budget
    is kept by doing both. Not frozen: one is made per layer and token, and freezing costs a microsecond.
    """

    hits: int = 0
    fetch: list[int] = field(default_factory=list)
    evict: list[int] = field(default_factory=list)
    unpin: list[int] = field(default_factory=list)
    """Pins given up because the budget shrank below them; they are in `evict` too."""
