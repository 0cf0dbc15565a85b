"""A request's time limit, enforced inside a decode: a batch of a long prompt can take longer than the whole limit.

Not here: a cancel by the client, which is the worker's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class Deadline:
    """From entry on, `seconds` (None: no limit) until `stop` is called, from a thread of its own. `stop` is never
    called after exit, so that it cannot hit the next request."""

    def __init__(self, seconds: float | None, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._over = False
        self._end: float | None = None
        self._timer: threading.Timer | None = None
        self.fired = False
        """Whether `stop` was called."""
        if seconds:
            self._end = time.perf_counter() + seconds
            self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._fire)
            self._timer.daemon = True

    @property
    def passed(self) -> bool:
        return self._end is not None and time.perf_counter() > self._end

    def _fire(self) -> None:
        with self._lock:
            if not self._over:
                self.fired = True
                self._stop()

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
        if self._timer is not None:
            self._timer.cancel()
