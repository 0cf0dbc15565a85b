"""The figures of docs/pagecache.md: what a page costs by each way of reading a range. Not a test.

    python tests/pages/figures.py FILE [STRIDE]

FILE: any file of 1 GiB or more on the disk to be measured; its pages are dropped. STRIDE: bytes of one extent
(884736: a gate of a 30B-A3B model in Q4_0). Each row: median of five runs over the same 256 extents at random places,
us of CPU a page by rusage (to ask for it, to fault it in, to drop it), MiB/s until all is there.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from expertd.pages import libc, ranges
from expertd.pages.disk import read_limits
from expertd.pages.mapping import MappedFiles
from expertd.pages.windows import Lane, plan_for
from expertd.types import Extent

RUNS, COUNT = 5, 256
Read = Callable[[int, int], None]


def _cpu() -> float:
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_stime + now.ru_utime


def _once(mapping: MappedFiles, extents: Sequence[Extent], read: Read) -> list[float]:
    f = mapping.files[0]
    spans = [ranges.span(e.offset, e.end, libc.PAGE) for e in extents]
    pages = sum(last - first for first, last in spans) / libc.PAGE

    def drop(first: int, last: int) -> None:
        libc.madvise(f.base + first, last - first, libc.MADV_DONTNEED)
        os.posix_fadvise(f.fd, first, last - first, os.POSIX_FADV_DONTNEED)

    drop(0, ranges.ceil(f.nbytes, libc.PAGE))
    marks, started = [_cpu()], perf_counter()
    for e in extents:
        read(e.offset, e.end)
    marks.append(_cpu())
    asked = perf_counter()
    for first, last in spans:
        libc.madvise(f.base + first, last - first, libc.MADV_POPULATE_READ)
    there = perf_counter()
    marks.append(_cpu())
    cached = libc.cachestat(f.fd, 0, 0)
    for first, last in spans:
        drop(first, last)
    marks.append(_cpu())
    over = cached.cached / pages - 1 if isinstance(cached, libc.CacheStat) else float("nan")
    costs = [1e6 * (b - a) / pages for a, b in pairwise(marks)]
    mib = pages * libc.PAGE / 2**20
    return [*costs, sum(costs), mib / (there - started), 1e3 * (asked - started), 100 * over]


def _ways(mapping: MappedFiles, stride: int) -> dict[str, Read]:
    f = mapping.files[0]
    limits = read_limits(f.path)
    scratch = memoryview(mmap.mmap(-1, 1 << 20))
    null = os.open(os.devnull, os.O_WRONLY)
    plain = {kb: Lane(mapping, [None], kb << 10) for kb in (128, 1024, 4096)}
    plan = plan_for(limits, stride)

    def pread(start: int, end: int) -> None:
        for at, nbytes in ranges.chunks(start, end, 1 << 20):
            os.preadv(f.fd, [scratch[:nbytes]], at)

    def sendfile(start: int, end: int) -> None:
        while start < end:
            start += os.sendfile(null, f.fd, start, min(end - start, 1 << 20))

    ways: dict[str, Read] = {
        f"WILLNEED by {kb} KiB": lambda start, end, lane=lane: lane.read(0, start, end)  # type: ignore[misc]
        for kb, lane in plain.items()
    }
    ways |= {"pread, 1 MiB": pread, "sendfile to /dev/null": sendfile}
    if limits.read_ahead_kb <= 512:
        # Beyond that each fault reads megabytes: minutes for one run.
        ways["faults alone"] = lambda start, end: None
    if plan is not None:
        lane = Lane(mapping, [plan], plan.chunk_bytes)
        if plan.needs_random:
            libc.madvise(f.base, f.nbytes, libc.MADV_RANDOM)
        ways["windows"] = lambda start, end: lane.read(0, start, end)
    return ways


def main(path: Path, stride: int) -> None:
    limits = read_limits(path)
    settings = f"read_ahead_kb {limits.read_ahead_kb}, max_sectors_kb {limits.max_sectors_kb}"
    print(f"{os.uname().release}, {settings}, {stride} bytes")
    print(f"{'':24}{'ask':>8}{'fault':>8}{'drop':>8}{'sum':>8}{'MiB/s':>8}{'ask ms':>8}{'over %':>8}")
    with MappedFiles.map([path]) as mapping:
        places = random.Random(1).sample(range(1, mapping.files[0].nbytes // stride - 1), COUNT)
        extents = [Extent(0, place * stride + 32, stride) for place in places]
        for name, read in _ways(mapping, stride).items():
            runs = [_once(mapping, extents, read) for _ in range(RUNS)]
            row = [statistics.median(column) for column in zip(*runs, strict=True)]
            print(f"{name:24}" + "".join(f"{value:8.2f}" if value < 100 else f"{value:8.0f}" for value in row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 884_736)
