"""The queue in front of the engine: order, limit, positions. Lives on the event loop; the engine thread takes from it.

Who goes next is decided in one place, `RequestQueue._pick`: the first, or whom `choose` names (`runtime.turns`).
Whoever is passed over is counted, and bounded: see `MOST_OVERTAKEN` and `MOST_SECONDS`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from expertd.engine.requests import Event, GenerationRequest
from expertd.errors import ExpertdError, QueueFullError

MOST_OVERTAKEN = 4
MOST_SECONDS = 10.0
"""A request that was overtaken so often, or has waited so long, is overtaken no more."""


@dataclass(eq=False)
class Job:
    """One request on its way. `post` hands an event (or the error that ended it) to the event loop."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | ExpertdError] = field(default_factory=asyncio.Queue)
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    cancelled: bool = False
    done_prompt: int = 0
    cached_prompt: int = 0
    """Of `done_prompt`, tokens that were not computed but taken over."""
    n_generated: int = 0
    overtaken: int = 0
    """How many that came later went before it."""
    uses: Mapping[int, int] | None = None
    """For `runtime.turns`: experts it is likely to want, by how often; None until that was looked up."""

    def post(self, event: Event | ExpertdError) -> None:
        """From the engine thread. A loop that is closed takes nothing more."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            self.cancelled = True


class RequestQueue:
    """At most `limit` jobs wait. `put`, `remove` and `waiting` are the loop's; `take` is the engine thread's.

    `choose` gets those that wait in order of arrival (at least one) and the time, and returns the index of the one that
    goes next. It is called in `take`, under the queue's lock; without it the first goes."""

    def __init__(self, limit: int, choose: Callable[[Sequence[Job], float], int] | None = None) -> None:
        self.limit = limit
        self._choose = choose
        self.overtakings = 0
        self._jobs: list[Job] = []
        self._ready = threading.Condition()
        self._closed = False
        self.running: Job | None = None
        self._seconds_a_job = 2.0

    def put(self, job: Job) -> int:
        """Queues a job; returns its position (0 runs next). Raises QueueFullError with when to come back."""
        with self._ready:
            position = len(self._jobs) + (1 if self.running else 0)
            if len(self._jobs) >= self.limit and self.running is not None:
                raise QueueFullError(
                    f"{len(self._jobs)} requests wait, as many as may",
                    hint="try again later or raise server.max_queue",
                    retry_after_seconds=max(1.0, self._seconds_a_job),
                )
            self._jobs.append(job)
            self._ready.notify()
            return position

    def remove(self, job: Job) -> bool:
        """Takes back a job that was not begun."""
        with self._ready:
            try:
                self._jobs.remove(job)
            except ValueError:
                return False
            return True

    def take(self) -> Job | None:
        """Waits for the next job; None once the queue is closed."""
        with self._ready:
            self._ready.wait_for(lambda: self._closed or self._jobs)
            if self._closed:
                return None
            job = self._pick()
            job.started_at = time.monotonic()
            self.running = job
            return job

    def finished(self, job: Job) -> None:
        """The engine thread is done with a job."""
        with self._ready:
            self.running = None
            spent = time.monotonic() - job.started_at
            self._seconds_a_job += 0.2 * (spent - self._seconds_a_job)

    def _pick(self) -> Job:
        if self._choose is None:
            return self._jobs.pop(0)
        index = self._choose(self._jobs, time.monotonic())
        for passed in self._jobs[:index]:
            passed.overtaken += 1
        self.overtakings += index
        return self._jobs.pop(index)

    def waiting(self) -> list[Job]:
        with self._ready:
            return list(self._jobs)

    def position(self, job: Job) -> int | None:
        """How many go before it; None once it runs."""
        with self._ready:
            try:
                return self._jobs.index(job) + (1 if self.running else 0)
            except ValueError:
                return None

    def close(self, error: Callable[[], ExpertdError]) -> None:
        """Ends `take` for good; jobs that wait get an error of `error`'s making."""
        with self._ready:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._ready.notify_all()
        for job in left:
            job.post(error())
