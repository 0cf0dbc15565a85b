"""The last half hour in figures, a point every tick: what the dashboard draws and `expertd top` shows.

Rates between two samples of `watch`, and where the memory is now. On the event loop; a point costs some microseconds
and a few hundred bytes. Long-term history is Prometheus's matter.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from expertd.telemetry.snapshot import HistogramData, Snapshot
from expertd.telemetry.watch import TICK_SECONDS, Sample

POINTS = 900
COLUMNS = (
    "at",
    "tokens_per_second",
    "prompt_tokens_per_second",
    "hit_ratio",
    "prompt_hit_ratio",
    "disk_read_bytes_per_second",
    "fetch_bytes_per_second",
    "major_faults_per_second",
    "wait_share",
    "stall_share",
    "budget_bytes",
    "resident_bytes",
)
"""A point's figures, in order. `at` is seconds since 1970. `tokens_per_second` is the speed of decoding while it went
on, not the tokens of the tick by its length; `prompt_tokens_per_second` comes with the end of a request. `wait_share`
and `stall_share` are of the tick: the engine asking or waiting for pages, and tasks stalled for want of memory (PSI).
None where there was nothing to measure."""

Point = tuple[float | None, ...]


class History:
    """One daemon's. `add` after every tick; `document` at any look."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._added = 0
        self._last: Sample | None = None
        self._run = f"{time.time_ns():x}-{os.getpid():x}"
        self._started_at = time.time()

    def add(self, sample: Sample) -> None:
        """Take the newest sample."""
        if self._last is not None and sample.at > self._last.at:
            self._points.append(_point(self._last, sample))
            self._added += 1
        self._last = sample

    def document(self, since: int | None = None) -> dict[str, Any]:
        """The points after number `since` (they count from 1), the number of the last one, and the memory now. `run`
        tells one life of the daemon from another."""
        new = self._added if since is None or since > self._added else self._added - since
        n = min(new, len(self._points))
        return {
            "run": self._run,
            "started_at": round(self._started_at, 3),
            "now": round(time.time(), 3),
            "seconds": TICK_SECONDS,
            "columns": COLUMNS,
            "last": self._added,
            "points": list(self._points)[len(self._points) - n :] if n else [],
            "memory": memory(self._last) if self._last else {},
        }


def memory(sample: Sample) -> Mapping[str, int]:
    """Bytes by kind; all but `budget` and `experts_total` add up to `limit`: what this process may use at most.

    Experts and dense weights are page cache, so what is not locked counts as available to the kernel and is taken out
    of `free` here. `other` is what else there is on the machine, or in the cgroup.
    """
    daemon, kernel = sample.daemon, sample.kernel
    cache, model = daemon.cache, daemon.model
    dense = model.dense_nbytes if model else 0
    pinned = cache.pinned_nbytes
    locked = min(dense, max(0, kernel.locked_nbytes - pinned))
    resident = cache.resident_nbytes - pinned
    reclaimable = resident + (dense - locked if daemon.steering else 0)
    free = max(0, kernel.available_nbytes - reclaimable)
    known = {
        "dense_locked": locked,
        "dense": dense - locked if daemon.steering else 0,
        "pinned": pinned,
        "resident": resident,
        "kv": daemon.kv_nbytes,
        "free": free,
    }
    other = max(0, kernel.limit_nbytes - sum(known.values()))
    return {
        **known,
        "other": other,
        "limit": kernel.limit_nbytes,
        "budget": cache.capacity_nbytes,
        "experts_total": model.expert_nbytes if model else 0,
    }


def _point(old: Sample, new: Sample) -> Point:
    a, b, seconds = old.daemon, new.daemon, new.at - old.at
    tokens, spent = _count(b.requests.inter_token) - _count(a.requests.inter_token), _spent(a, b)
    prompt_tokens = _computed(b) - _computed(a)
    prompt_seconds = b.requests.prompt_seconds - a.requests.prompt_seconds
    prompts = (b.cache.prompt_requests - a.cache.prompt_requests, b.cache.prompt_hits - a.cache.prompt_hits)
    requests, hits = b.cache.requests - a.cache.requests - prompts[0], b.cache.hits - a.cache.hits - prompts[1]
    return (
        round(time.time(), 3),
        _ratio(tokens, spent, 3),
        _ratio(prompt_tokens, prompt_seconds, 2),
        _ratio(hits, requests, 4),
        _ratio(prompts[1], prompts[0], 4),
        round((new.kernel.read_nbytes - old.kernel.read_nbytes) / seconds),
        round((b.pager.fetch_nbytes - a.pager.fetch_nbytes) / seconds),
        round((new.kernel.major_faults - old.kernel.major_faults) / seconds, 1),
        round(min(1.0, max(0.0, (b.pager.wait_seconds - a.pager.wait_seconds) / seconds)), 4),
        _stalled(old.kernel.stall_some_seconds, new.kernel.stall_some_seconds, seconds),
        b.cache.capacity_nbytes if b.steering else None,
        b.cache.resident_nbytes if b.steering else None,
    )


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole > 0 else None


def _stalled(old: float | None, new: float | None, seconds: float) -> float | None:
    return None if old is None or new is None else round(max(0.0, (new - old) / seconds), 4)


def _count(histogram: HistogramData) -> int:
    return sum(histogram.counts)


def _spent(a: Snapshot, b: Snapshot) -> float:
    return b.requests.inter_token.total - a.requests.inter_token.total


def _computed(snapshot: Snapshot) -> int:
    """Prompt tokens that had to be computed."""
    return snapshot.requests.prompt_tokens - snapshot.requests.cached_prompt_tokens
