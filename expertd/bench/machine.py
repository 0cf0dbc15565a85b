"""What a number was measured on: a benchmark without its machine is hearsay."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from expertd.engine.settings import physical_cores
from expertd.errors import PagesError
from expertd.pages import disk, memory


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes, and bytes a second. `disk_sequential` is a probe past the page cache; None where it could not be made."""

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    swap_bytes: int
    kernel: str
    file_system: str
    read_ahead_kb: int
    disk_sequential: float | None
    disk_random: float | None
    python: str
    llama_cpp_python: str
    expertd: str


def describe(model: Path) -> Machine:
    """This machine, and the disk under `model`, of which a few hundred MB are read."""
    snapshot = memory.snapshot()
    try:
        speed = disk.probe(model)
    except PagesError:
        speed = None
    return Machine(
        cpu=_cpu(),
        cores=physical_cores(),
        threads=len(os.sched_getaffinity(0)),
        memory_bytes=snapshot.total_bytes,
        swap_bytes=snapshot.swap_total_bytes,
        kernel=platform.release(),
        file_system=disk.file_system(model).kind,
        read_ahead_kb=disk.read_limits(model).read_ahead_kb,
        disk_sequential=speed.sequential if speed else None,
        disk_random=speed.random if speed else None,
        python=platform.python_version(),
        llama_cpp_python=_version("llama-cpp-python"),
        expertd=_version("expertd"),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
