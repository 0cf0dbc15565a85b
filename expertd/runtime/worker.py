"""The engine thread: opens the session, runs one request after the other, closes the session.

It owns everything of llama.cpp. The event loop reaches it through the request queue; it answers through `Job.post`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from expertd.engine.context import Cancelled
from expertd.engine.generate import Outcome
from expertd.engine.requests import Finished, GenerationRequest, PromptProgress, Queued, Receipt
from expertd.errors import EngineError, ExpertdError, ModelChangedError
from expertd.runtime.admission import Job, RequestQueue
from expertd.runtime.hang import Signs
from expertd.runtime.meter import Meter
from expertd.runtime.session import Session
from expertd.runtime.stats import Stats

log = logging.getLogger("expertd.engine")


class Care(Protocol):
    """What goes on around the requests, called in this thread; see `runtime.care`."""

    def opened(self, session: Session) -> str:
        """The session is open: what must be done before requests; returns the state that follows."""

    def begins(self, request: GenerationRequest) -> None: ...

    def prompting(self, n_left: int) -> None:
        """So many tokens of the prompt are still to be computed; 0 when it is done."""

    def ended(self, n_tokens: int) -> None:
        """The request is over, however; it computed so many tokens of prompt and answer."""


class EngineThread:
    """`start` once, `stop` once. `on_change` is called (in this thread) with the new state and, for failed, why."""

    def __init__(
        self,
        open_session: Callable[[], Session],
        queue: RequestQueue,
        stats: Stats,
        on_change: Callable[[str, str], None],
        care: Care,
    ) -> None:
        self._open, self._queue, self._stats = open_session, queue, stats
        self._on_change, self._care = on_change, care
        self._thread = threading.Thread(target=self._run, name="expertd-engine", daemon=True)
        self._lock = threading.Lock()
        self._current: Job | None = None
        self.session: Session | None = None
        self._busy = False
        self._steps = 0

    def start(self) -> None:
        self._thread.start()

    def cancel(self, job: Job) -> None:
        """Stops a running job within a graph node. From any thread; nothing happens when it does not run."""
        with self._lock:
            job.cancelled = True
            if self._current is job and self.session is not None:
                self.session.context.cancel()

    def stop(self, seconds: float) -> bool:
        """Cancels what runs, waits for the thread. False when it did not end in time."""
        with self._lock:
            if self._current is not None and self.session is not None:
                self._current.cancelled = True
                self.session.context.cancel()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def signs(self) -> Signs | None:
        """What moves while the engine works (see `hang`); None while it has nothing to do. From any thread."""
        if not self._busy:
            return None
        tap = self.session.tap if self.session is not None else None
        return self._steps, *((tap.counters.splits, tap.counters.skipped) if tap is not None else ())

    def abandon(self, error: ExpertdError) -> None:
        """Gives up what runs: its client is told now. The thread is left where it stands; should it come back, it
        finds its work cancelled. From any thread."""
        with self._lock:
            job = self._current
            if job is None:
                return
            job.cancelled = True
            if self.session is not None:
                self.session.context.cancel()
        job.post(error)

    def _run(self) -> None:
        try:
            self._busy = True
            self._on_change("loading", "")
            self.session = self._open()
            self._on_change("warming", "")
            self._on_change(self._care.opened(self.session), "")
        except ExpertdError as error:
            self._on_change("failed", error.line())
            return
        except Exception as error:  # whatever it is, the daemon must say so and not hang in "loading"
            log.exception("the model could not be opened")
            self._on_change("failed", f"unexpected: {error!r}")
            return
        finally:
            self._busy = False
        while (job := self._queue.take()) is not None:
            self._tell_positions()
            try:
                self._serve(job, self.session)
            finally:
                self._queue.finished(job)
        self.session.close()

    def _tell_positions(self) -> None:
        for position, waiting in enumerate(self._queue.waiting()):
            waiting.post(Queued(position + 1))

    def _serve(self, job: Job, session: Session) -> None:
        with self._lock:
            if job.cancelled:
                self._stats.cancelled += 1
                return
            session.context.clear_cancel()
            self._current = job
        self._steps += 1
        self._busy = True
        outcome = self._outcome(job, session)
        self._busy = False
        self._care.ended(job.done_prompt - job.cached_prompt + job.n_generated)
        with self._lock:
            self._current = None
        job.post(outcome)

    def _outcome(self, job: Job, session: Session) -> Finished | ExpertdError:
        """The last event, or the error that ended it."""
        try:
            self._care.begins(job.request)
            return self._generate(job, session)
        except Cancelled as error:
            self._stats.cancelled += 1
            return error
        except ModelChangedError as error:
            # Nothing more can be computed with these weights: the service ends, and comes back with the new file.
            self._stats.failed += 1
            self._on_change("failed", error.line())
            return error
        except ExpertdError as error:
            self._stats.failed += 1
            return error
        except Exception as error:  # the request fails, the service goes on
            log.exception("a request failed")
            self._stats.failed += 1
            return EngineError(f"the engine failed: {error!r}", hint="see the log")

    def _generate(self, job: Job, session: Session) -> Finished:
        session.check_identity()
        meter = Meter(session)
        run = session.generation.run(job.request)
        before = time.monotonic()
        while True:
            try:
                event = next(run)
            except StopIteration as end:
                session.check_identity()
                return self._finished(job, session, end.value, meter.receipt())
            session.check_files()
            if job.cancelled:
                run.close()
                raise Cancelled("the request was cancelled")
            self._steps += 1
            now = time.monotonic()
            if isinstance(event, PromptProgress):
                job.done_prompt, job.cached_prompt = event.done, event.cached
                self._care.prompting(event.total - event.done)
            elif event.tokens:
                if job.n_generated:
                    self._stats.inter_token_seconds.observe(now - before)
                job.n_generated += 1
                self._stats.generated_tokens += 1
            before = now
            job.post(event)

    def _finished(self, job: Job, session: Session, outcome: Outcome, receipt: Receipt) -> Finished:
        stats, timings = self._stats, outcome.timings
        queue_seconds = job.started_at - job.queued_at
        stats.requests += 1
        stats.prompt_tokens += timings.cache_n + timings.prompt_n
        stats.cached_prompt_tokens += timings.cache_n
        stats.prompt_seconds += timings.prompt_ms / 1000
        stats.generation_seconds += timings.predicted_ms / 1000
        stats.queue_seconds += queue_seconds
        if outcome.first_token_ms:
            stats.first_token_seconds.observe(queue_seconds + outcome.first_token_ms / 1000)
        stats.request_seconds.observe(time.monotonic() - job.queued_at)
        return Finished(
            reason=outcome.reason,
            stop_text=outcome.stop_text,
            prompt_tokens=len(job.request.prompt),
            timings=timings,
            receipt=receipt,
            queue_ms=queue_seconds * 1000,
            first_token_ms=outcome.first_token_ms,
        )
