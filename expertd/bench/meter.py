"""What this process has cost so far: time, processor, major faults, bytes read from disk."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals of all threads since the process started; a difference of two is a cost."""

    seconds: float
    cpu_seconds: float
    major_faults: int
    read_bytes: int
    """Read from storage for this process, by its faults, read-ahead and advice; not what came from the cache."""

    def since(self, earlier: Reading) -> Reading:
        """The cost between two readings."""
        return Reading(
            self.seconds - earlier.seconds,
            self.cpu_seconds - earlier.cpu_seconds,
            self.major_faults - earlier.major_faults,
            self.read_bytes - earlier.read_bytes,
        )

    def plus(self, other: Reading) -> Reading:
        """Two costs together."""
        return Reading(
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.major_faults + other.major_faults,
            self.read_bytes + other.read_bytes,
        )


ZERO = Reading(0.0, 0.0, 0, 0)


def read() -> Reading:
    """Now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Reading(time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_majflt, _read_bytes("self"))


def read_other(pid: int) -> Reading:
    """Of another process of the same user, now; its processor time is in ticks of some 10 ms. Raises OSError."""
    # The command's name, in brackets, may hold anything; what follows its last bracket does not.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Reading(time.perf_counter(), cpu, int(fields[9]), _read_bytes(str(pid)))


def _read_bytes(process: str) -> int:
    for line in (_PROC / process / "io").read_text().splitlines():
        name, _, number = line.partition(":")
        if name == "read_bytes":
            return int(number)
    return 0
