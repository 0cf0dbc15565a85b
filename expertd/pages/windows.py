"""Read exact ranges of files into the page cache in large folios, for a quarter of what WILLNEED costs.

WILLNEED allocates, inserts and later drops single pages: about 3 us of kernel time per 4 KiB. The kernel's own
read-ahead fills a window with folios of up to 2 MiB (ext4 since Linux 6.16, xfs since 5.18), but decides itself how
far it reads. This module makes it open a window exactly where one is wanted. `docs/pagecache.md` has the figures.

How one window is opened, on two descriptors whose read-ahead states are used for nothing else:
1. A page is left out, so that no older page lies before; WILLNEED on the 2 or 3 pages behind it (descriptor `a`).
2. A touch of the page behind those, on `a`: a miss after a short run of cached pages reads as many more, and marks the
   last with the flag that says "read on when someone comes here". A page that is there ends it: step 5 does the rest.
3. A touch of the marked page on `b`, which has not seen this stream: the kernel reads on from the next missing page, in
   a window sized by the length of the touch, with folios four times as large as those of the last window on `b`.
4. The new window's first page is marked now, which would make a fault read further. Where windows are longer than the
   read-ahead setting, a touch on `a` takes the mark off: all pages within its reach are there. Elsewhere the mapping
   must be told MADV_RANDOM, so that faults leave marks alone (`Plan.needs_random`).
5. WILLNEED over the whole range: it reads what is still missing (the page left out, the ends, all of it if the kernel
   plays by other rules) and nothing twice.

Windows start at odd pages, so that the marked page is a folio of its own: the kernel maps marked folios page by page.

Only hints are given: a kernel that does otherwise reads by step 5 alone, or reads too much, which `Lane.exact`
finds out by the bytes that the thread was charged for.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from expertd.pages import libc, ranges
from expertd.pages.disk import ReadLimits
from expertd.pages.mapping import MappedFiles
from expertd.types import Extent

# Below this the four calls of a window cost more than larger folios save.
MIN_PAGES = 48
_MAX_ORDER = 9
_LARGE_AHEAD_PAGES = 64
# At most this much goes into one window where the device would take more: larger folios save no more.
_MAX_WINDOW_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What the device's limits allow. `ahead_pages` and `io_pages` are the kernel's ra_pages and io_pages."""

    ahead_pages: int
    io_pages: int
    needs_random: bool
    min_pages: int

    @property
    def chunk_bytes(self) -> int:
        """The most that one WILLNEED takes."""
        return max(self.ahead_pages, self.io_pages, 1) * libc.PAGE


def plan_for(limits: ReadLimits, typical_bytes: int) -> Plan | None:
    """How windows are opened on a device for extents of a typical size; None where they gain nothing.

    1. Unknown limits, no read-ahead, or extents shorter than MIN_PAGES: none.
    2. Extents well beyond the read-ahead setting, and a device that takes more at once: marks can be taken off.
    3. A large setting: marks stay, so that the mapping needs MADV_RANDOM, which such a setting wants anyway.
    4. Else none.
    """
    ahead, io = limits.read_ahead_kb * 1024 // libc.PAGE, limits.max_sectors_kb * 1024 // libc.PAGE
    pages = typical_bytes // libc.PAGE
    if not limits.known or pages < MIN_PAGES or ahead < 8:
        return None
    beyond = max(ahead + 13, MIN_PAGES)
    if io > ahead and pages >= beyond:
        return Plan(ahead, io, False, beyond)
    return Plan(ahead, io, True, MIN_PAGES) if ahead >= _LARGE_AHEAD_PAGES else None


class Lane:
    """Reading by one thread: its own descriptors, its own read-ahead state. One a thread."""

    def __init__(self, mapping: MappedFiles, plans: Sequence[Plan | None], chunk_bytes: int) -> None:
        self._mapping = mapping
        self._plans: list[Plan | None] = list(plans)
        self._chunk = chunk_bytes
        self._touch = libc.Touch()
        self._pairs: list[tuple[int, int] | None] = [
            _pair(f.fd) if plan is not None and self._touch.possible else None
            for f, plan in zip(mapping.files, plans, strict=True)
        ]
        self._orders = [0] * len(self._pairs)
        self.calls = 0
        self.windows = 0
        self.errors = 0

    def read(self, file: int, start: int, end: int, *, marks: bool = True) -> None:
        """Start reading the pages that the bytes [start, end) of a file touch. Folios larger than a page lie inside
        the range, so that it can be dropped whole. Never waits for the disk unless its queue is full.

        `marks` False where the mapping has no MADV_RANDOM: no window is opened that would leave a mark."""
        pair, plan = self._pairs[file], self._plans[file]
        if pair is None or plan is None or (plan.needs_random and not marks):
            self._willneed(self._mapping.files[file].fd, start, end, self._chunk)
            return
        page = libc.PAGE
        at, last = -(-start // page), end // page
        while last - at >= plan.min_pages:
            opened = self._open_window(file, pair, plan, at, last)
            if not opened:
                break
            at = opened
        self._willneed(pair[0], start, end, plan.chunk_bytes)

    def _open_window(self, file: int, pair: tuple[int, int], plan: Plan, at: int, last: int) -> int:
        """Steps 1 to 4 for a window that starts behind page `at`. Returns the page behind it, 0 if there is none."""
        page, touch, (a, b) = libc.PAGE, self._touch, pair
        cached, missed = (2, 1) if at & 1 else (3, 2)
        begin = at + 1 + cached
        first = begin + cached + missed
        ask, size = self._size(file, plan, first, last - first)
        if not size:
            return 0
        try:
            os.posix_fadvise(a, (at + 1) * page, cached * page, os.POSIX_FADV_WILLNEED)
        except OSError:
            self.errors += 1
            return 0
        self.calls += 2
        if touch(a, begin * page, missed * page):
            # It is there already. A touch on `b` could come upon the mark of the window that brought it.
            return 0
        touch(b, (first - 1) * page, ask * page)
        self.calls += 1
        self.windows += 1
        if not plan.needs_random:
            touch(a, first * page, page)
            self.calls += 1
        return first + size

    def _size(self, file: int, plan: Plan, first: int, want: int) -> tuple[int, int]:
        """(pages to ask for in step 3, pages that the kernel then reads), at most `want`; (0, 0) if nothing fits.

        A touch longer than the setting gets its own length where the device takes that much at once (odd, or the end
        is rounded down). A shorter one is a length to ramp up from: four times, from a sixteenth of the setting twice,
        from a half the setting itself; the end is then rounded down to the folio size.
        """
        ahead, io = plan.ahead_pages, plan.io_pages
        if not plan.needs_random:
            size = ask = min(want, io, _MAX_WINDOW_PAGES) - 1 | 1
            if size <= ahead or size > want:
                return 0, 0
            most = ask
        else:
            most = ahead
            four = min(want // 4, ahead // 16 - 1)
            two = min(want // 2, ahead // 2)
            size, ask = max((4 * four, four - 1), (2 * two, two - 1) if two >= ahead // 16 else (0, 0))
            if ask < 1:
                return 0, 0
        order = self._orders[file] + 2
        align = 1 << min(order, (most & -most).bit_length() - 1)
        cut = ranges.floor(first + size, align)
        if cut > first:
            size = cut - first
        self._orders[file] = min(order, _MAX_ORDER, size.bit_length() - 1)
        return ask, size

    def _willneed(self, fd: int, start: int, end: int, chunk: int) -> None:
        page = libc.PAGE
        at, stop = ranges.floor(start, page), ranges.ceil(end, page)
        while at < stop:
            step = min(chunk, stop - at)
            self.calls += 1
            try:
                os.posix_fadvise(fd, at, step, os.POSIX_FADV_WILLNEED)
            except OSError:
                self.errors += 1
            at += step

    def exact(self, extents: Sequence[Extent]) -> bool | None:
        """Whether windows read what they should, tried on extents that nobody needs: they are dropped first.

        False when the kernel read more than asked; None when it cannot be told (all of it was in use). The bytes read
        are those that the kernel charged to this thread.
        """
        told = False
        for e in extents:
            fd = self._mapping.files[e.file].fd
            first, last = ranges.span(e.offset, min(e.end, self._mapping.files[e.file].nbytes), libc.PAGE)
            os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
            windows, before = self.windows, _read_bytes()
            self.read(e.file, e.offset, e.end)
            read = _read_bytes() - before
            if read > last - first:
                return False
            told = told or (self.windows > windows and read >= (last - first) * 0.9)
        return True if told else None

    def plain(self, file: int | None = None) -> None:
        """Read by WILLNEED alone from now on."""
        for i in range(len(self._pairs)) if file is None else (file,):
            pair, self._pairs[i] = self._pairs[i], None
            for fd in pair or ():
                with contextlib.suppress(OSError):
                    os.close(fd)

    def close(self) -> None:
        self.plain()


def _pair(fd: int) -> tuple[int, int] | None:
    """Two new open files of what `fd` has open, each with a read-ahead state of its own; the name may be gone. None
    without /proc, or without the right to open it again."""
    path, flags = f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC
    try:
        first = os.open(path, flags)
    except OSError:
        return None
    try:
        return first, os.open(path, flags)
    except OSError:
        os.close(first)
        return None


def _read_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock * 512
