"""Which pages are locked in memory, counted page by page where two ranges meet.

mlock does not stack: one munlock undoes any number of locks, also of a neighbour's share of a page. So pages that more
than one range may touch are counted here; the pages inside a range belong to it alone. A range that goes beyond
RLIMIT_MEMLOCK is refused by the kernel and is never fatal: it is reported with limit, wanted and got.

One thread at a time. The addresses are those of a mapping; which experts they belong to `pager` knows.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertd.pages import libc, ranges
from expertd.units import format_size

# Locked in pieces so that a large range stops close to the limit, and that no other thread waits long for the mapping.
_PIECE = 16 << 20
LOCK_REASONS = ("limit", "memory", "other")


@dataclass(frozen=True, slots=True)
class LockReport:
    """What was asked and what was locked. `limit_bytes` is None without a limit; `code` the errno of the refusal."""

    wanted_bytes: int
    got_bytes: int
    limit_bytes: int | None
    code: int

    def warning(self) -> str:
        if self.code == errno.EIO:
            got, wanted = format_size(self.got_bytes), format_size(self.wanted_bytes)
            return f"locked {got} of {wanted} wanted: the next page cannot be read"
        limit = "none" if self.limit_bytes is None else format_size(self.limit_bytes)
        return (
            f"locked {format_size(self.got_bytes)} of {format_size(self.wanted_bytes)} wanted, "
            f"limit {limit} ({errno.errorcode.get(self.code, 'partial')}); raise LimitMEMLOCK or ulimit -l"
        )


def reason(code: int, nbytes: int) -> str:
    """Why the kernel refused to lock `nbytes` more, as one of LOCK_REASONS, from its errno.

    1. EPERM: nothing may be locked at all. EAGAIN: the pages could not be brought in, so memory is short (here or in
       the cgroup).
    2. ENOMEM says either that RLIMIT_MEMLOCK would be passed or that the mapping cannot be split any further
       (vm.max_map_count): the limit tells which.
    """
    if code == errno.EPERM:
        return "limit"
    if code == errno.EAGAIN:
        return "memory"
    limit = lock_limit()
    # Whole pages are locked, so a range may need two more than its bytes.
    if code == errno.ENOMEM and limit is not None and locked_by_kernel() + nbytes + 2 * libc.PAGE > limit:
        return "limit"
    return "other"


def refusal_words(why: str) -> str:
    """One of LOCK_REASONS in a sentence's words."""
    if why != "limit":
        return "memory is too short to bring it in" if why == "memory" else "the kernel refused to lock it"
    limit = lock_limit()
    most = "none" if limit is None else format_size(limit)
    return f"the limit on locked memory is {most}; raise LimitMEMLOCK or ulimit -l"


def lock_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes, None when unlimited or when CAP_IPC_LOCK lifts it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _has_ipc_lock():
        return None
    return soft


def locked_by_kernel() -> int:
    """VmLck of this process in bytes, as the kernel counts."""
    return _status_field("VmLck:", 10) * 1024


class PageLocks:
    """Locked ranges of one address space. See the module for the rules."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._shared: dict[int, int] = {}
        self.locked_bytes = 0

    def lock(self, extents: Sequence[tuple[int, int]]) -> int:
        """Lock all of these byte ranges or none. 0, or the errno that the kernel gave. Each counts once more."""
        for done, (start, end) in enumerate(extents):
            first, last = ranges.span(start, end, self._page)
            code = libc.mlock(first, last - first)
            if code:
                # A range that was refused half way may have locked its front.
                self._release(first, last, start, end)
                self.unlock(extents[:done])
                return code
            self._count(start, end)
        return 0

    def unlock(self, extents: Iterable[tuple[int, int]]) -> None:
        """Undo one `lock` of each of these byte ranges."""
        for start, end in extents:
            first, last = ranges.span(start, end, self._page)
            for page in self._borders(start, end):
                left = self._shared[page] - 1
                if left:
                    self._shared[page] = left
                else:
                    del self._shared[page]
                    self.locked_bytes -= self._page
            own = ranges.owned(start, end, self._page)
            self.locked_bytes -= own[1] - own[0]
            self._release(first, last, start, end)

    def lock_most(self, extents: Sequence[tuple[int, int]]) -> LockReport:
        """Lock in order, piece by piece, until the kernel refuses, then as much of that piece as the limit leaves."""
        wanted = sum(end - start for start, end in extents)
        got = code = 0
        limit = lock_limit()
        for start, end in extents:
            for at, nbytes in ranges.chunks(start, end, _PIECE):
                code = self.lock([(at, at + nbytes)])
                if code and limit is not None:
                    nbytes = min(nbytes, ranges.floor(limit - locked_by_kernel(), self._page) - self._page)
                    if nbytes > 0 and self.lock([(at, at + nbytes)]) == 0:
                        got += nbytes
                if code:
                    return LockReport(wanted, got, limit, code)
                got += nbytes
        return LockReport(wanted, got, limit, 0)

    def unlock_most(self, extents: Iterable[tuple[int, int]], nbytes: int) -> None:
        """Undo a `lock_most` of these ranges that got `nbytes`."""
        for start, end in extents:
            for at, length in ranges.chunks(start, end, _PIECE):
                if nbytes <= 0:
                    return
                self.unlock([(at, at + min(length, nbytes))])
                nbytes -= length

    def _count(self, start: int, end: int) -> None:
        own = ranges.owned(start, end, self._page)
        self.locked_bytes += own[1] - own[0]
        for page in self._borders(start, end):
            seen = self._shared.get(page, 0)
            self._shared[page] = seen + 1
            if not seen:
                self.locked_bytes += self._page

    def _release(self, first: int, last: int, start: int, end: int) -> None:
        """munlock a span except the border pages that something else still counts."""
        borders = self._borders(start, end)
        if borders and borders[0] == first and borders[0] in self._shared:
            first += self._page
        if borders and borders[-1] == last - self._page and borders[-1] in self._shared:
            last -= self._page
        if last > first:
            libc.munlock(first, last - first)

    def _borders(self, start: int, end: int) -> tuple[int, ...]:
        """Pages that the range touches without owning them: none, one or two."""
        first, last = ranges.span(start, end, self._page)
        head, tail = start != first, end != last
        if last - first == self._page:
            return (first,) if head or tail else ()
        return ((first,) if head else ()) + ((last - self._page,) if tail else ())


def _status_field(name: str, base: int) -> int:
    with open("/proc/self/status", errors="replace") as f:
        for line in f:
            if line.startswith(name):
                return int(line.split()[1], base)
    return 0


def _has_ipc_lock() -> bool:
    return bool(_status_field("CapEff:", 16) >> 14 & 1)
