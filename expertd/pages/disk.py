"""The block device and the file system under a model: read-ahead limits, whether it can be steered, how fast it is.

Everything is read from /proc and /sys (another root may be given); only `probe` touches the disk. What windows follow
from the limits lies in `windows`; what a person is told about them lies in `doctor`.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from expertd.errors import PagesError

ROOT = Path("/")
# The kernel's default for read_ahead_kb, and what a device without sysfs entries is taken to have.
DEFAULT_READ_AHEAD_KB = 128
_DEPTH = 8

_CANNOT = {
    "9p": "its pages are cached by the host",
    "drvfs": "its pages are cached by Windows",
    "virtiofs": "with DAX its pages are the host's",
    "zfs": "the ARC keeps a second copy of every mapped page",
    "nfs": "dropping pages reads them over the network again",
    "nfs4": "dropping pages reads them over the network again",
    "cifs": "dropping pages reads them over the network again",
    "smb3": "dropping pages reads them over the network again",
    "tmpfs": "its pages are the file: nothing can be dropped",
    "ramfs": "its pages are the file: nothing can be dropped",
}


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one call may read ahead, in KiB. `known` is False where the device shows neither."""

    read_ahead_kb: int
    max_sectors_kb: int
    known: bool


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Type and mount point of a file. `reason` says why it cannot be steered, and is empty where it can."""

    kind: str
    mount: str
    reason: str

    @property
    def steerable(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Speed:
    """What a probe measured, past the page cache. Bytes a second; `read_bytes` is what it read for that."""

    sequential: float
    random: float
    read_bytes: int
    seconds: float


def read_limits(path: Path, root: Path = ROOT) -> ReadLimits:
    """Limits of the device that holds a file; a partition has those of its disk."""
    return device_limits(os.stat(path).st_dev, root)


def device_limits(device: int, root: Path = ROOT) -> ReadLimits:
    """As `read_limits`, by the device's number: asks nothing of the device itself, which may hang."""
    name = f"{os.major(device)}:{os.minor(device)}"
    ahead = _number(root / "sys/class/bdi" / name / "read_ahead_kb")
    block = root / "sys/dev/block" / name
    sectors = None
    for queue in (block / "queue", block / ".." / "queue"):
        sectors = sectors if sectors is not None else _number(queue / "max_sectors_kb")
        ahead = ahead if ahead is not None else _number(queue / "read_ahead_kb")
    return ReadLimits(
        read_ahead_kb=DEFAULT_READ_AHEAD_KB if ahead is None else ahead,
        max_sectors_kb=DEFAULT_READ_AHEAD_KB if sectors is None else sectors,
        known=ahead is not None and sectors is not None,
    )


def file_system(path: Path, root: Path = ROOT) -> FileSystem:
    """The mount that holds a path, by the longest mount point."""
    real = os.path.realpath(path)
    best = ("unknown", "/")
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[1]):
            best = (kinds[0], point)
    kind = best[0]
    reason = _CANNOT.get(kind, "")
    if not reason and kind.startswith("fuse") and kind != "fuseblk":
        reason = "a file system in user space may bypass the page cache"
    return FileSystem(kind, best[1], reason)


def probe(
    path: Path,
    *,
    nbytes: int = 256 << 20,
    block: int = 1 << 20,
    seed: int = 0,
    clock: Callable[[], float] = perf_counter,
) -> Speed:
    """Read `nbytes` in order and half as much at random with O_DIRECT, leaving the page cache as it is.

    `_DEPTH` requests at a time, since disks of our days need several to show what they can. PagesError where the file
    cannot be read past the page cache.
    """
    blocks = os.stat(path).st_size // block
    if not blocks:
        raise PagesError(f"{path} is too small to measure a disk with", hint=f"it needs at least {block} bytes")
    picks = random.Random(seed)
    count = max(1, min(nbytes // block, blocks))
    first = picks.randrange(0, blocks - count + 1)
    in_order = [(first + i) * block for i in range(count)]
    scattered = [picks.randrange(blocks) * block for _ in range(max(1, count // 2))]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        raise PagesError(f"{path} cannot be read past the page cache: {error.strerror}") from error
    try:
        started = clock()
        done = _read_all(fd, in_order, block)
        middle = clock()
        done += _read_all(fd, scattered, block)
        ended = clock()
    except OSError as error:
        raise PagesError(f"{path} cannot be read past the page cache: {error.strerror}") from error
    finally:
        os.close(fd)
    return Speed(
        sequential=count * block / max(middle - started, 1e-9),
        random=len(scattered) * block / max(ended - middle, 1e-9),
        read_bytes=done,
        seconds=ended - started,
    )


def _read_all(fd: int, places: Sequence[int], block: int) -> int:
    """Bytes read at the places, by `_DEPTH` threads that each take every so many-th."""

    def read(places: Sequence[int]) -> int:
        with mmap.mmap(-1, block) as memory, memoryview(memory) as buffer:
            return sum(os.preadv(fd, [buffer], at) for at in places)

    with ThreadPoolExecutor(_DEPTH) as pool:
        return sum(pool.map(read, [places[i::_DEPTH] for i in range(_DEPTH)]))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
