"""What the kernel knows of this process and this machine at one moment: faults, bytes read, memory, pressure.

A few small files under /proc and the cgroup, some hundreds of microseconds in all; never the model. What the daemon
knows of itself is in `snapshot`.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from expertd.pages import locks, memory


@dataclass(frozen=True, slots=True)
class Readings:
    """Counters of the process since its start, and the machine now. `stall_*` seconds are PSI's of memory, of the
    cgroup where it has its own, else of the machine since boot; None where the kernel keeps none."""

    major_faults: int = 0
    minor_faults: int = 0
    read_nbytes: int = 0
    locked_nbytes: int = 0
    stall_some_seconds: float | None = None
    stall_full_seconds: float | None = None
    cpu_seconds: float = 0.0
    cpu_wait_seconds: float | None = None
    """Time that threads of this process ran, and time that they could have run and waited for a processor. None where
    the kernel does not account for it."""
    available_nbytes: int = 0
    limit_nbytes: int = 0
    swap_used_nbytes: int = 0
    refault_nbytes: int = 0
    """File pages read again soon after the kernel took them, of the cgroup where it counts, else of the machine."""


def take(proc_io: Path = Path("/proc/self/io")) -> Readings:
    """Read it all now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    levels = _levels()
    machine = memory.snapshot(levels=levels)
    pressure = machine.pressure
    return Readings(
        major_faults=usage.ru_majflt,
        minor_faults=usage.ru_minflt,
        read_nbytes=_read_nbytes(proc_io),
        locked_nbytes=locks.locked_by_kernel(),
        stall_some_seconds=pressure.some_seconds if pressure else None,
        stall_full_seconds=pressure.full_seconds if pressure else None,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        cpu_wait_seconds=_cpu_wait_seconds(Path("/proc/self/task")),
        available_nbytes=machine.usable_bytes,
        limit_nbytes=machine.limit_bytes,
        swap_used_nbytes=machine.swap_used_bytes,
        refault_nbytes=memory.reclaim(levels=levels).refault_bytes,
    )


@cache
def _levels() -> tuple[memory.Level, ...]:
    """The cgroups above this process; it is not moved while it runs."""
    return tuple(memory.cgroup_levels())


def _read_nbytes(path: Path) -> int:
    """Bytes that this process made the disk read. 0 where the kernel does not account for it."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _cpu_wait_seconds(tasks: Path) -> float | None:
    """The sum over the threads that live now of the second number of schedstat: nanoseconds ready and not running."""
    total, known = 0, False
    for task in tasks.iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
            known = True
        except (OSError, IndexError, ValueError):
            continue
    return total / 1e9 if known else None
