"""What one request cost in experts, disk and time, by difference of counters and of the kernel's accounts.

The engine runs one request at a time, so the difference is that request's. All of it in the engine's thread.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from expertd.engine.requests import Receipt
from expertd.runtime.hang import bytes_read
from expertd.runtime.session import Session

_SCHEDULER = Path("/proc/thread-self/schedstat")


class Meter:
    """Starts when it is made."""

    def __init__(self, session: Session) -> None:
        self._steering = session.steering
        self._usage = self._steering.usage() if self._steering else None
        self._faults, self._read, self._stood = _major_faults(), bytes_read(), stood_seconds()

    def receipt(self) -> Receipt:
        """The cost so far."""
        faults, read, stood = _major_faults() - self._faults, bytes_read() - self._read, stood_seconds()
        waited = None if stood is None or self._stood is None else max(0.0, stood - self._stood) * 1000
        if self._steering is None or self._usage is None:
            return Receipt(bytes_read=read, io_wait_ms=waited, major_faults=faults)
        now = self._steering.usage()
        return Receipt(
            expert_requests=now.requests - self._usage.requests,
            expert_hits=now.hits - self._usage.hits,
            bytes_read=read,
            io_wait_ms=waited,
            major_faults=faults,
        )


def stood_seconds() -> float | None:
    """A clock of the time in which this thread neither ran nor waited for a processor; only differences mean anything.

    While the engine computes nothing but pages makes it stand still, those that another compute thread waits for
    included where that takes long. The kernel's own account of waits for disks (delayacct) is off by default; where it
    was on, the two agreed within milliseconds a request. None where the kernel does not tell how long a thread waited
    for a processor.
    """
    try:
        queued_ns = int(_SCHEDULER.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return time.monotonic() - time.thread_time() - queued_ns / 1e9


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
