"""A cold page cache, or a warm one, for the files of one model, and for nothing else on the machine.

`posix_fadvise(DONTNEED)` drops a file's clean pages that no process maps: nothing needs root and nothing else loses its
cache, as it would with /proc/sys/vm/drop_caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from expertd.pages import libc

_STEP = 4 << 20


def drop(files: Iterable[Path]) -> int | None:
    """Drops the files' pages. Returns the bytes that stayed (mapped or locked by someone), None when the kernel does
    not tell."""
    left: int | None = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            # Dirty pages cannot be dropped: a file that was just made is written out first.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = _cached_nbytes(fd)
        finally:
            os.close(fd)
        left = None if left is None or cached is None else left + cached
    return left


def fill(files: Iterable[Path]) -> None:
    """Reads the files from end to end, so that they are cached as far as there is memory."""
    buffer = bytearray(_STEP)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_nbytes(path: Path) -> int | None:
    """Bytes of the file in the page cache, None when the kernel does not tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return _cached_nbytes(fd)
    finally:
        os.close(fd)


def _cached_nbytes(fd: int) -> int | None:
    answer = libc.cachestat(fd, 0, os.fstat(fd).st_size)
    return None if isinstance(answer, int) else answer.cached * libc.PAGE
