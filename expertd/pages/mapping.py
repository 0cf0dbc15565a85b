"""Where each model file lies in this process's address space, and whether it is still the file that was opened.

`MappedFiles.adopt` finds the mapping that llama.cpp made; `MappedFiles.map` makes one of its own (for `warm`, which
runs without llama.cpp). Either keeps a read-only descriptor of each file for the calls that go by file. What is done
to the pages lies in `pager`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from expertd.errors import ModelChangedError, ModelNotFoundError, ModelReadError, PagesError
from expertd.pages import libc, ranges
from expertd.types import Extent

_PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class MappedFile:
    """One file: byte `o` of it is at `base + o` wherever `covered` says it is mapped."""

    path: Path
    fd: int
    nbytes: int
    base: int
    covered: tuple[tuple[int, int], ...]
    """Mapped byte ranges [start, end) of the file; llama.cpp unmaps what it copied elsewhere."""
    identity: tuple[int, int]
    mtime_ns: int

    def unreadable_in(self, start: int, end: int) -> ModelReadError:
        """The error for a range of which some page is refused; names the first one."""
        for at in range(start, min(end, self.nbytes), libc.PAGE):
            try:
                os.pread(self.fd, 1, at)
            except OSError:
                return unreadable(self.path, at)
        return unreadable(self.path, start)


class MappedFiles:
    """The mappings of a model's files, in file order. Any thread may read; `close` belongs to the owner."""

    def __init__(self, files: Sequence[MappedFile], *, owned: bool) -> None:
        self.files = tuple(files)
        self._owned = owned
        self._closed = False

    @classmethod
    def map(cls, paths: Sequence[Path]) -> MappedFiles:
        """Map whole files, reading nothing. ModelNotFoundError, PagesError."""
        done: list[MappedFile] = []
        try:
            for path in paths:
                fd, stat = _open(path)
                try:
                    base = libc.map_file(fd, stat.st_size)
                except OSError as error:
                    os.close(fd)
                    raise PagesError(f"cannot map {path}: {error.strerror}") from error
                done.append(_mapped(path, fd, stat, base, ((0, stat.st_size),)))
        except BaseException:
            cls(done, owned=True).close()
            raise
        return cls(done, owned=True)

    @classmethod
    def adopt(cls, paths: Sequence[Path], *, maps: Path = Path("/proc/self/maps")) -> MappedFiles:
        """Find the mappings that this process already has of the files. PagesError when one has none."""
        regions = _regions(maps)
        done: list[MappedFile] = []
        try:
            for path in paths:
                fd, stat = _open(path)
                found = _largest(regions, path, stat)
                if found is None:
                    os.close(fd)
                    raise PagesError(f"{path} is not mapped in this process", hint="load it with mmap on")
                done.append(_mapped(path, fd, stat, *found))
        except BaseException:
            cls(done, owned=False).close()
            raise
        return cls(done, owned=False)

    def read_in(self, report: Callable[[int], None]) -> None:
        """Reads all that is mapped, telling the percent done. ModelReadError where the disk does not give a part.

        For a load that lets the kernel populate a mapping: mmap, like mlock (see `libc.mlock`), never returns from a
        page that the disk refuses.
        """
        done, total = 0, sum(f.nbytes for f in self.files)
        for f in self.files:
            for at, nbytes in ranges.chunks(0, f.nbytes, _PIECE):
                if libc.madvise(f.base + at, nbytes, libc.MADV_POPULATE_READ) == errno.EFAULT:
                    raise f.unreadable_in(at, at + nbytes)
                done += nbytes
                report(100 * done // total)

    def clip(self, extents: Iterable[Extent]) -> Iterator[Extent]:
        """The parts that are mapped: what llama.cpp copied to a GPU, it unmapped."""
        for e in extents:
            for start, end in self.files[e.file].covered:
                first, last = max(start, e.offset), min(end, e.end)
                if first < last:
                    yield Extent(e.file, first, last - first)

    def check(self) -> None:
        """Two stat calls a file: raises ModelChangedError when a file was cut, rewritten, replaced or taken away."""
        for f in () if self._closed else self.files:
            now = os.fstat(f.fd)
            if now.st_size < f.nbytes:
                raise _changed(f, f"was cut by {f.nbytes - now.st_size} bytes")
            if now.st_mtime_ns != f.mtime_ns:
                raise _changed(f, "was rewritten in place")
            try:
                named = os.stat(f.path)
            except OSError as error:
                raise _changed(f, f"is gone ({error.strerror})") from error
            if (named.st_dev, named.st_ino) != f.identity:
                raise _changed(f, "was replaced by another file")

    def close(self) -> None:
        """Give descriptors back, and unmap what `map` mapped."""
        if self._closed:
            return
        self._closed = True
        for f in self.files:
            if self._owned:
                libc.unmap(f.base, f.nbytes)
            with contextlib.suppress(OSError):
                os.close(f.fd)

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _changed(f: MappedFile, what: str) -> ModelChangedError:
    return ModelChangedError(f"{f.path} {what} while it was in use", hint="restart expertd with the new file")


def unreadable(path: Path, offset: int) -> ModelReadError:
    """The error for a byte that the disk does not give."""
    return ModelReadError(
        f"{path} cannot be read at byte {offset}: input/output error",
        hint="the kernel's log (dmesg) tells what the disk has; copy or download the file anew and restart expertd",
    )


def find_address(address: int, path: Path, fd: int, *, maps: Path = Path("/proc/self/maps")) -> int | None:
    """Where the file would begin in the mapping of it that holds an address; None where none does. `fd` is open on
    the file, whose name may be another's by now."""
    stat, real = os.fstat(fd), os.path.realpath(path)
    for r in _regions(maps):
        if r.start <= address < r.end:
            same = r.inode == stat.st_ino and r.device == (os.major(stat.st_dev), os.minor(stat.st_dev))
            return r.start - r.offset if same or r.path.removesuffix(" (deleted)") == real else None
    return None


def _open(path: Path) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelNotFoundError(f"cannot open {path}: {error.strerror}") from error
    return fd, os.fstat(fd)


def _mapped(path: Path, fd: int, stat: os.stat_result, base: int, covered: tuple[tuple[int, int], ...]) -> MappedFile:
    return MappedFile(path, fd, stat.st_size, base, covered, (stat.st_dev, stat.st_ino), stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _Region:
    start: int
    end: int
    offset: int
    device: tuple[int, int]
    inode: int
    path: str


def _regions(maps: Path) -> list[_Region]:
    found = []
    for line in maps.read_text(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        start, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        device, offset = (int(major, 16), int(minor, 16)), int(fields[2], 16)
        found.append(_Region(int(start, 16), int(end, 16), offset, device, int(fields[4]), fields[5]))
    return found


def _largest(
    regions: list[_Region], path: Path, stat: os.stat_result
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Base and covered ranges of the mapping that covers most of the file.

    Overlayfs and btrfs show another device in maps than in stat, so the real path counts as well as the inode.
    """
    device, real = (os.major(stat.st_dev), os.minor(stat.st_dev)), os.path.realpath(path)
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r in regions:
        if r.path == real or (r.inode == stat.st_ino and r.device == device):
            pieces[r.start - r.offset].append((r.offset, min(r.offset + r.end - r.start, stat.st_size)))
    if not pieces:
        return None
    base = max(pieces, key=lambda b: sum(end - start for start, end in pieces[b]))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pieces[base]):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return base, tuple(merged)
