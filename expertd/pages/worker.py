"""One thread that does the page work which no token waits for: evictions, speculative reads, pins, warm-up.

What to do is decided elsewhere; here is only the order: evictions first (all that wait, in one batch, so that
neighbours go in one call), then speculative reads, pins, and warm-up last. Longer jobs are iterators: one step is done
at a time, and anything more urgent goes between two steps. A job that has to wait yields a number of seconds, which
end early when anything more urgent comes. A job can be cancelled between steps; the thread outlives every error in a
job, which its ticket keeps.

Methods may be called from any thread and never wait for the kernel, except `drain`, `stop` and `Ticket.wait`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from expertd.pages.pager import Pager
from expertd.types import Extent

log = logging.getLogger(__name__)

# The kernel drops no page that is being read. What was evicted on the heels of its own fetch is therefore dropped once
# more when the thread has had nothing to do for this long; experts that are held again by then are left alone.
_SECOND_LOOK_SECONDS = 0.05
_MOST_SECOND_LOOKS = 4096


class Kind(IntEnum):
    """What a job is, the most urgent first."""

    EVICT = 0
    PREFETCH = 1
    PIN = 2
    WARM = 3


class Ticket:
    """The state of one job: `finished` once it is done, cancelled or failed with `error`."""

    __slots__ = ("_event", "cancelled", "error", "kind", "steps")

    def __init__(self, kind: Kind, steps: Iterator[object]) -> None:
        self.kind, self.steps = kind, steps
        self.cancelled = False
        self.error: Exception | None = None
        self._event = threading.Event()

    @property
    def finished(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        """Let the job end before its next step."""
        self.cancelled = True

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the job was finished within the time."""
        return self._event.wait(seconds)

    def finish(self, error: Exception | None = None) -> None:
        """For the worker alone."""
        self.error = error
        self._event.set()


@dataclass(slots=True)
class WorkerCounters:
    """Plain integers, written by the worker's thread under its lock."""

    jobs: int = 0
    steps: int = 0
    failed: int = 0
    cancelled: int = 0
    evict_batches: int = 0
    prefetched_experts: int = 0
    prefetch_dropped: int = 0


class PagerWorker:
    """The pager's thread. `start` once, `stop` once; the queues are guarded by one lock that no system call is
    made under."""

    def __init__(self, pager: Pager) -> None:
        self.pager = pager
        self.counters = WorkerCounters()
        self._ready = threading.Condition()
        self._evictions: list[int] = []
        self._second_look: list[int] = []
        """Dropped once; pages that were still being read then have stayed."""
        self._prefetches: deque[Sequence[int]] = deque()
        self._jobs: dict[Kind, deque[Ticket]] = {Kind.PIN: deque(), Kind.WARM: deque()}
        self._busy = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="expertd-pager", daemon=True)
        self._thread.start()

    def evict(self, experts: Sequence[int]) -> int:
        """Drop experts soon. One that is fetched again before its turn stays. Returns how many wait now."""
        self.pager.release(experts)
        with self._ready:
            self._evictions.extend(experts)
            self._ready.notify()
            return len(self._evictions)

    def take_evictions(self) -> list[int]:
        """What waits to be dropped, for a caller that cannot wait for it; `look_again` is then due."""
        with self._ready:
            taken, self._evictions = self._evictions, []
        return taken

    def look_again(self, experts: Sequence[int]) -> None:
        """Experts that another thread dropped: their pages that were being read then go when there is time."""
        with self._ready:
            self._second_look = (self._second_look + list(experts))[-_MOST_SECOND_LOOKS:]
            self._ready.notify()

    def prefetch(self, experts: Sequence[int]) -> None:
        """Start reading experts (ascending) that may be needed."""
        with self._ready:
            self._prefetches.append(experts)
            self._ready.notify()

    def cancel_prefetches(self) -> list[int]:
        """Forget the speculative reads that were not begun; returns their experts."""
        with self._ready:
            left = [e for experts in self._prefetches for e in experts]
            self._prefetches.clear()
            self.counters.prefetch_dropped += len(left)
        return left

    def pin(self, experts: Sequence[int], *, at_once: int = 8) -> Ticket:
        """Read in and lock experts until the limit. `pager.pinned` says which are."""
        return self.submit(Kind.PIN, self._pin_steps(experts, at_once))

    def unpin(self, experts: Sequence[int]) -> Ticket:
        return self.submit(Kind.PIN, (self.pager.unpin([e]) for e in experts))

    def lock_extents(self, extents: Sequence[Extent]) -> Ticket:
        """Lock ranges (the dense weights); the report is logged by the pager."""
        return self.submit(Kind.PIN, (self.pager.lock_extents([e]) for e in extents))

    def submit(self, kind: Kind, steps: Iterable[object]) -> Ticket:
        """Run an iterator step by step as a pin or a warm-up job."""
        ticket = Ticket(kind, iter(steps))
        with self._ready:
            if self._stopping:
                ticket.cancelled = True
                ticket.finish()
                return ticket
            self._jobs[kind].append(ticket)
            self._ready.notify()
        return ticket

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing is queued and nothing runs. False when the time was too short."""
        with self._ready:
            return self._ready.wait_for(self._idle, seconds)

    def stop(self, seconds: float = 5.0) -> bool:
        """End after the step at hand; what waits is cancelled. False when the thread did not end in time."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        if self._thread is None:
            self._cancel_all()
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Experts and jobs in the queues."""
        with self._ready:
            queued = sum(len(q) for q in self._jobs.values())
            return len(self._evictions) + sum(len(p) for p in self._prefetches) + queued

    def _idle(self) -> bool:
        return not (self._busy or self._evictions or self._prefetches or any(self._jobs.values()))

    def _run(self) -> None:
        while True:
            with self._ready:
                self._busy = False
                if self._idle():
                    self._ready.notify_all()
                patience = _SECOND_LOOK_SECONDS if self._second_look else None
                self._ready.wait_for(partial(self._wanted, patience), patience)
                if self._stopping:
                    break
                if patience is None and self._idle():
                    continue
                if self._idle():
                    evictions, self._second_look = self._second_look, []
                else:
                    evictions, self._evictions = self._evictions, []
                    self._second_look = (self._second_look + evictions)[-_MOST_SECOND_LOOKS:]
                prefetch = self._prefetches.popleft() if not evictions and self._prefetches else None
                ticket = None if evictions or prefetch else next(q[0] for q in self._jobs.values() if q)
                if ticket is not None:
                    # A warm-up or pin may read what was dropped before it says that it holds it.
                    self._second_look = []
                self._busy = True
            if ticket is None:
                self._simple(evictions, prefetch or ())
            else:
                self._step(ticket)
        self._cancel_all()

    def _wanted(self, patience: float | None) -> bool:
        """Whether there is something to do, or, for one that waits without end, to be done in a while."""
        return self._stopping or not self._idle() or (patience is None and bool(self._second_look))

    def _simple(self, evictions: Sequence[int], prefetch: Sequence[int]) -> None:
        try:
            if evictions:
                self.counters.evict_batches += 1
                self.pager.drop_released(evictions)
            if prefetch:
                self.counters.prefetched_experts += len(prefetch)
                self.pager.prefetch(prefetch)
        except Exception:
            self.counters.failed += 1
            log.exception("page work failed")

    def _step(self, ticket: Ticket) -> None:
        error: Exception | None = None
        ended = ticket.cancelled
        if not ended:
            try:
                pause = next(ticket.steps)
                self.counters.steps += 1
                if isinstance(pause, float):
                    self._rest(pause, ticket)
                return
            except StopIteration:
                self.counters.jobs += 1
            except Exception as failure:
                error = failure
                self.counters.failed += 1
                log.warning("%s job failed: %s", ticket.kind.name.lower(), failure)
        else:
            self.counters.cancelled += 1
        with self._ready:
            self._jobs[ticket.kind].remove(ticket)
        ticket.finish(error)

    def _rest(self, seconds: float, ticket: Ticket) -> None:
        def urgent() -> bool:
            more = self._evictions or self._prefetches or self._jobs[Kind.PIN] or ticket.cancelled
            return self._stopping or bool(more)

        with self._ready:
            self._ready.wait_for(urgent, seconds)

    def _cancel_all(self) -> None:
        with self._ready:
            left = [t for q in self._jobs.values() for t in q]
            for q in self._jobs.values():
                q.clear()
            self._evictions.clear()
            self._prefetches.clear()
            self._ready.notify_all()
        for ticket in left:
            ticket.cancelled = True
            self.counters.cancelled += 1
            ticket.finish()

    def _pin_steps(self, experts: Sequence[int], at_once: int) -> Iterator[None]:
        for i in range(0, len(experts), at_once):
            part = experts[i : i + at_once]
            if len(self.pager.pin(part)) < len(part):
                return
            yield
