"""The runtime's counters: plain numbers that the telemetry floor reads when it is scraped.

Each has one writer (the engine thread, or the event loop for what is marked so). Counters of the cache, the pager and
the tap live with those.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

FETCH_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTER_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
DURATION_BOUNDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


@dataclass
class Histogram:
    """`counts[i]` observations at or below `bounds[i]`; the last one is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass
class Stats:
    """Since the start of the process."""

    fetch_seconds: Histogram = field(default_factory=lambda: Histogram(FETCH_BOUNDS))
    """One observation a layer that had to fetch: the time the engine thread spent asking for it."""
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS))
    prompt_tokens: int = 0
    """Prompt tokens of all requests, those reused included; `cached_prompt_tokens` counts the latter."""
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    queue_seconds: float = 0.0
    auto_pinned: int = 0
    auto_unpinned: int = 0
    """Experts that the daemon pinned by itself, and those of them that it gave up again (keeper's thread)."""
    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    """Refused because the queue was full (event loop)."""
