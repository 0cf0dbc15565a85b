"""Notices that the engine stands still: a decode or a load that shows no sign of life for longer than it may.

A long step is not a hang: a token may take ten seconds while the disk thrashes, a prompt's batch minutes on a slow
processor. So not the length of a step is bounded but the time in which nothing moves at all. What moves:

1. a step ends, or the load reports progress;
2. the tap sees a layer of the graph;
3. a page fault that went to the disk is over, or bytes were read (a disk that is slow but alive);
4. the process computes: half a processor or more of its time. llama.cpp does not tell how far a graph is, so that this
   could be an endless loop as well; it is let go on for `COMPUTING_TIMES` as long.

The watch runs on the event loop and asks nothing that a disk could keep waiting. Not here: what is done about a hang
(`service`), and the process's end (`daemon.life`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

COMPUTING_TIMES = 10
_COMPUTING_SHARE = 0.5
_MOST_GAP_LOOKS = 2.0

Signs = tuple[object, ...]
"""Whatever differs between two looks where something moved."""


class HangWatch:
    """Call `look` about every `interval_seconds`; `limit_seconds` 0 never finds a hang. Event loop."""

    def __init__(
        self,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.limit_seconds = limit_seconds
        self.interval_seconds = min(1.0, limit_seconds / 4) if limit_seconds else 1.0
        self._clock, self._cpu_clock = clock, cpu_clock
        self._signs: Signs | None = None
        self._at = clock()
        self._cpu = cpu_clock()
        self.still_seconds = 0.0
        """How long nothing has moved; 0 while idle."""
        self._computed_seconds = 0.0

    def look(self, signs: Signs | None) -> bool:
        """Whether it hangs. `signs` None: there is nothing to do, so that nothing need move."""
        now, cpu = self._clock(), self._cpu_clock()
        # A process that was stopped, or a machine that slept, did not look: that time is not the engine's.
        gap = min(now - self._at, _MOST_GAP_LOOKS * self.interval_seconds)
        spent = min(cpu - self._cpu, gap)
        self._at, self._cpu = now, cpu
        if signs is None or signs != self._signs:
            self._signs, self.still_seconds, self._computed_seconds = signs, 0.0, 0.0
            return False
        self.still_seconds += gap
        self._computed_seconds += spent
        if not self.limit_seconds:
            return False
        computes = self._computed_seconds >= _COMPUTING_SHARE * self.still_seconds
        return self.still_seconds >= self.limit_seconds * (COMPUTING_TIMES if computes else 1)


def reading_signs() -> Signs:
    """What tells that the disk still answers this process: page faults that waited for it, bytes read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt, bytes_read()


def bytes_read() -> int:
    """Bytes that this process made the disk read; 0 where the kernel does not account for it."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
