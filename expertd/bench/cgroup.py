"""Runs a command in a fresh memory cgroup, v1 or v2, that bounds its memory and page cache. Needs root.

1. v1: a child of this process's own group in the memory hierarchy, so that limits above still hold.
2. v2: a group with processes in it may not hand controllers down, so a child of the nearest ancestor that does; if none
   does, the topmost group is asked to.
3. The command joins by itself, then executes: not even its loader runs outside.
4. Swap is refused: an arm that swaps measures the swap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertd.errors import BenchError
from expertd.units import format_size

_JOIN = 'echo $$ > "$0" && exec "$@"'
_HINT = "run as root, or bound memory from outside (systemd-run --scope -p MemoryMax=5G ...) and give --memory none"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup with a limit in bytes. `path` is its directory."""

    path: Path
    version: int
    limit_bytes: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` wrapped so that it runs in the group."""
        return ["/bin/sh", "-c", _JOIN, str(self.path / "cgroup.procs"), *argv]

    def oom_kills(self) -> int:
        """How many of its processes the kernel killed for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in _text(self.path / name).splitlines():
            key, _, number = line.partition(" ")
            if key == "oom_kill":
                return int(number)
        return 0

    def peak_bytes(self) -> int | None:
        """The most memory it ever held, page cache included; None when the kernel does not tell."""
        text = _text(self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"))
        return int(text) if text.strip().isdigit() else None


@contextmanager
def memory_group(limit_bytes: int, root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """A fresh group, removed at the end. Raises BenchError when there is no root, no controller or no permission."""
    if os.geteuid() != 0:
        raise BenchError("a memory limit needs root to make a cgroup", hint=_HINT)
    version, parent = _parent(root)
    path = parent / f"expertd-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.mkdir()
    except OSError as e:
        raise BenchError(f"cannot make a memory cgroup in {parent}: {e.strerror}", hint=_HINT) from e
    try:
        group = MemoryGroup(path, version, limit_bytes)
        _limit(group)
        yield group
    finally:
        _remove(path)


def _limit(group: MemoryGroup) -> None:
    name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    try:
        (group.path / name).write_text(str(group.limit_bytes))
    except OSError as e:
        raise BenchError(f"cannot limit memory to {format_size(group.limit_bytes)}: {e.strerror}", hint=_HINT) from e
    no_swap = ("memory.swap.max", "0") if group.version == 2 else ("memory.swappiness", "0")
    try:
        (group.path / no_swap[0]).write_text(no_swap[1])
    except OSError:
        # Built without swap accounting: then there is no such file, and mostly no swap.
        return


def _remove(path: Path) -> None:
    """The kernel lets a group go a moment after its last process."""
    for _ in range(50):
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)


def _parent(root: Path) -> tuple[int, Path]:
    """(cgroup version, directory in which to make the group). Raises BenchError when memory is controlled nowhere."""
    v1 = v2 = None
    for line in _text(root / "proc/self/mounts").splitlines():
        _, where, kind, options, *_ = line.split()
        mount = root / where.lstrip("/")
        if kind == "cgroup" and "memory" in options.split(","):
            v1 = mount
        elif kind == "cgroup2" and "memory" in _text(mount / "cgroup.controllers").split():
            v2 = mount
    if v1 is not None:
        own = v1 / _own_path(root, "memory")
        return 1, own if own.is_dir() else v1
    if v2 is not None:
        return 2, _v2_parent(v2, v2 / _own_path(root, ""))
    raise BenchError("no cgroup controls memory on this machine", hint=_HINT)


def _own_path(root: Path, controller: str) -> str:
    """This process's path in a hierarchy, relative to its mount; "" names the one of v2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _v2_parent(mount: Path, own: Path) -> Path:
    at = own if own.is_dir() else mount
    while True:
        if "memory" in _text(at / "cgroup.subtree_control").split():
            return at
        if at == mount:
            break
        at = at.parent
    try:
        (mount / "cgroup.subtree_control").write_text("+memory")
    except OSError as e:
        raise BenchError(f"{mount} does not hand the memory controller down: {e.strerror}", hint=_HINT) from e
    return mount


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
