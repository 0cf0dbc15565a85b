"""Takes a sample every few seconds, compares it with an older one, and keeps the verdict.

On the event loop; one tick costs a snapshot and a few small files. A window is as short as enough tokens allow, so
that what passes quickly is seen: one tick for a fast model, ten seconds for a slow one. A change of cause counts, and
is said in the log, once two ticks agree on it, so that one odd window does not talk; but a change of topic is over by
then, and its own threshold is far above chance. What the figures mean is `verdict`'s.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expertd.errors import PagesError
from expertd.pages import disk
from expertd.telemetry import readings
from expertd.telemetry.readings import Readings
from expertd.telemetry.snapshot import Snapshot
from expertd.telemetry.verdict import STARTING, Verdict, Window, decide

log = logging.getLogger(__name__)

TICK_SECONDS = 2.0
_WINDOW_SECONDS = 10.0
_WINDOW_TOKENS = 8
_PROBE_NBYTES = 64 << 20
_MEMORY_SECONDS = 180.0
# Requests after which the usual hit ratio has half forgotten what was before.
_USUAL_REQUESTS = 50_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; `at` is monotonic seconds."""

    at: float
    daemon: Snapshot
    kernel: Readings


class Watch:
    """The verdict of one daemon. `tick` is called on the event loop, `verdict` may be read anywhere.

    `read_ahead_kb` gives the setting of the model's disk now.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        kernel: Callable[[], Readings] = readings.take,
        *,
        read_ahead_kb: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.verdict: Verdict = STARTING
        self.last_busy: Verdict | None = None
        """The last verdict that was not idle or starting: the answer to "why was it slow just now"."""
        self.disk_rate: float | None = None
        """Bytes a second that the model's disk gives, set once it was measured. Not to be guessed from what is read:
        that would call any steady rate a disk at its limit."""
        self._snapshot, self._kernel, self._read_ahead_kb = snapshot, kernel, read_ahead_kb
        self._samples: deque[Sample] = deque()
        self._usual: float | None = None
        self._usual_requests = 0
        self._candidate = self._said = STARTING.cause
        self._thrashing_said = False

    @property
    def latest(self) -> Sample | None:
        """The last sample taken."""
        return self._samples[-1] if self._samples else None

    def tick(self, now: float) -> Verdict:
        """Take a sample at `now` (monotonic seconds) and decide."""
        sample = Sample(now, self._snapshot(), self._kernel())
        while self._samples and now - self._samples[0].at > _MEMORY_SECONDS:
            self._samples.popleft()
        before = next((s for s in reversed(self._samples) if _enough(s, sample)), None)
        before = before or (self._samples[0] if self._samples else None)
        self._samples.append(sample)
        if before is None:
            return self.verdict
        window = self._window(before, sample)
        self._learn(sample, window)
        self._keep(decide(window))
        return self.verdict

    def _window(self, old: Sample, new: Sample) -> Window:
        a, b = old.daemon, new.daemon
        seconds = new.at - old.at
        # Between tokens, which is counted as it passes; the prompt's and the answer's own seconds when a request ends.
        generating = min(seconds, b.requests.inter_token.total - a.requests.inter_token.total)
        read = new.kernel.read_nbytes - old.kernel.read_nbytes
        model = b.model
        return Window(
            seconds=seconds,
            state=b.state,
            steering=b.steering,
            in_flight=b.requests.in_flight,
            queued=b.requests.queued,
            prompt_tokens=_computed(b) - _computed(a),
            generated_tokens=b.requests.generated_tokens - a.requests.generated_tokens,
            prompt_seconds=min(seconds - generating, b.requests.prompt_seconds - a.requests.prompt_seconds),
            generation_seconds=generating,
            queue_seconds=b.requests.queue_seconds - a.requests.queue_seconds,
            wait_seconds=b.pager.wait_seconds - a.pager.wait_seconds,
            requests=_decoded(b)[0] - _decoded(a)[0],
            hits=_decoded(b)[1] - _decoded(a)[1],
            usual_hit_ratio=self._usual,
            miss_nbytes=_missed(b) - _missed(a),
            read_nbytes=read,
            read_since_start_nbytes=new.kernel.read_nbytes,
            refault_nbytes=new.kernel.refault_nbytes - old.kernel.refault_nbytes,
            major_faults=new.kernel.major_faults - old.kernel.major_faults,
            disk_rate=self.disk_rate,
            read_ahead_kb=self._read_ahead_kb(),
            evicted=_evicted(b) - _evicted(a),
            dropped=b.cache.evictions.get("dropped", 0) - a.cache.evictions.get("dropped", 0),
            capacity_nbytes=b.cache.capacity_nbytes,
            capacity_before_nbytes=max(s.daemon.cache.capacity_nbytes for s in self._samples),
            budget_auto=b.cache.budget_auto,
            resident_nbytes=b.cache.resident_nbytes,
            expert_nbytes=model.expert_nbytes if model else 0,
            model_nbytes=model.expert_nbytes + model.dense_nbytes if model else 0,
            stall_seconds=_since(old.kernel.stall_some_seconds, new.kernel.stall_some_seconds),
            cpu_seconds=new.kernel.cpu_seconds - old.kernel.cpu_seconds,
            cpu_wait_seconds=max(0.0, _since(old.kernel.cpu_wait_seconds, new.kernel.cpu_wait_seconds) or 0.0),
            swap_grown_nbytes=new.kernel.swap_used_nbytes - old.kernel.swap_used_nbytes,
        )

    def _learn(self, new: Sample, window: Window) -> None:
        """Move the usual hit ratio: the mean of what was seen since the cache was full, slowly forgetting. Windows
        overlap, so each counts by what is new in it."""
        ratio = window.hit_ratio
        if ratio is None or window.filling:
            return
        fresh = _decoded(new.daemon)[0] - _decoded(self._samples[-2].daemon)[0]
        self._usual_requests = min(_USUAL_REQUESTS, self._usual_requests + fresh)
        weight = fresh / max(1, self._usual_requests)
        self._usual = ratio if self._usual is None else self._usual + weight * (ratio - self._usual)

    def _keep(self, verdict: Verdict) -> None:
        agreed = verdict.cause == self._candidate
        self._candidate = verdict.cause
        if verdict.cause in ("starting", "idle"):
            self.verdict = verdict
            return
        if self.verdict.cause in ("starting", "idle") or agreed or verdict.cause == "topic":
            self.verdict = self.last_busy = verdict
        if verdict is self.verdict and (verdict.cause != self._said or verdict.thrashing != self._thrashing_said):
            self._said, self._thrashing_said = verdict.cause, verdict.thrashing
            log.log(logging.WARNING if verdict.thrashing else logging.INFO, "%s", verdict.line())


def _enough(old: Sample, new: Sample) -> bool:
    """Whether the time between two samples is long enough to judge by."""
    tokens = _computed(new.daemon) - _computed(old.daemon)
    tokens += new.daemon.requests.generated_tokens - old.daemon.requests.generated_tokens
    return tokens >= _WINDOW_TOKENS or new.at - old.at >= _WINDOW_SECONDS - 0.01


def _computed(snapshot: Snapshot) -> int:
    return snapshot.requests.prompt_tokens - snapshot.requests.cached_prompt_tokens


def _decoded(snapshot: Snapshot) -> tuple[int, int]:
    """(requests, hits) of decoding; prompts touch nearly all experts and would drown it."""
    cache = snapshot.cache
    return cache.requests - cache.prompt_requests, cache.hits - cache.prompt_hits


def _missed(snapshot: Snapshot) -> int:
    return snapshot.cache.request_nbytes - snapshot.cache.hit_nbytes


def _evicted(snapshot: Snapshot) -> int:
    """Experts given up for others; not those that a smaller budget or the kernel took."""
    return sum(n for cause, n in snapshot.cache.evictions.items() if cause in ("route", "predict", "transient"))


def _since(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else new - old


def measure_disk(model: Path) -> float | None:
    """The speed of a model's disk for `Watch.disk_rate`: a short read past the page cache. For a thread; None where it
    cannot be measured or the file is too small to tell."""
    try:
        if model.stat().st_size < _PROBE_NBYTES:
            return None
        return disk.probe(model, nbytes=_PROBE_NBYTES).sequential
    except (OSError, PagesError):
        return None
