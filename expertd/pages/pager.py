"""Bring experts into the page cache, drop them, and lock them: the doing of what `cache` decides.

Places are computed once: each layer keeps offset and stride of its stacked tensors in matmul order, so a fetch is a
loop of `Lane.read`. `fetch` belongs to the engine thread; `prefetch`, `evict`, `pin`, `lock_extents` and `wait` may run
on another (`worker`), one thread at a time. Reading itself lives in `windows`, locks of pages in `locks`, residency in
`residency`.

The page at a border belongs to two experts. A fetch covers it. An eviction takes it along only when the neighbour on
its other side in the same tensor is out as well, by `held`, one byte an expert; the border of a whole tensor always
stays. That is at most two pages a tensor, and it never drops a byte that someone holds.

A fetch that meets the eviction of the same expert half way may lose pages again: the fault reads them, slower but
never wrong.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from expertd.pages import libc, ranges, windows
from expertd.pages.disk import read_limits
from expertd.pages.locks import LOCK_REASONS, LockReport, PageLocks, reason
from expertd.pages.mapping import MappedFile, MappedFiles
from expertd.pages.residency import resident_bytes, resident_pages
from expertd.types import ExpertLayout, ExpertTensor, Extent

log = logging.getLogger(__name__)
# Experts that calibration may read and drop.
_TRIES = 4
_DROPPED_AT_ONCE = 4


@dataclass(slots=True)
class PagerCounters:
    """Plain integers, written by the threads above and read by whoever scrapes."""

    fetches: int = 0
    fetched_experts: int = 0
    fetch_bytes: int = 0
    fetch_ns: int = 0
    evicted_experts: int = 0
    evict_calls: int = 0
    evict_bytes: int = 0
    evict_errors: int = 0
    evict_ns: int = 0
    waits: int = 0
    wait_errors: int = 0
    wait_ns: int = 0
    lock_errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOCK_REASONS, 0))
    """Refused locks by their reason."""


class _Tensor:
    """A stacked tensor. Small experts that follow each other are read in one call."""

    __slots__ = ("count", "file", "merges", "offset", "stride")

    def __init__(self, tensor: ExpertTensor, count: int) -> None:
        self.file, self.offset, self.stride, self.count = tensor.file, tensor.offset, tensor.stride, count
        self.merges = tensor.stride < windows.MIN_PAGES * libc.PAGE


class Pager:
    """Fetch, evict and pin experts of one model by id. See the module for which thread calls what."""

    def __init__(self, layout: ExpertLayout, mapping: MappedFiles) -> None:
        self.layout, self.mapping = layout, mapping
        self.counters = PagerCounters()
        self.held = bytearray(layout.n_layers * layout.n_experts)
        self.locks = PageLocks(libc.PAGE)
        self._pinned: set[int] = set()
        self.lock_refusal = ""
        """The reason of the last lock that the kernel refused, one of LOCK_REASONS."""
        self._n = layout.n_experts
        self._tensors: list[tuple[_Tensor, ...]] = [()] * layout.n_layers
        for moe in layout.layers:
            self._tensors[moe.layer] = tuple(_Tensor(t, moe.n_experts) for t in moe.tensors)
        typical = min((t.stride for moe in layout.layers for t in moe.tensors), default=0)
        limits = [read_limits(f.path) for f in mapping.files]
        self._plans = [windows.plan_for(limit, typical) for limit in limits]
        chunk = 1024 * min(max(limit.read_ahead_kb, limit.max_sectors_kb) for limit in limits)
        self._lane = windows.Lane(mapping, self._plans, chunk)
        self._side = windows.Lane(mapping, self._plans, chunk)

    def calibrate(self) -> str:
        """Try on a few experts that nobody holds whether reading in large folios is exact here, and how to go on.

        Returns "windows" or "plain". Before this it is "windows" where the device's limits allow it. Reads and drops
        a few experts; engine thread, before the first token.

        Also makes the kernel forget which absent experts it once took from a former reader: a page that it remembers
        counts as a refault when it is read, however long ago that was, and refaults are taken for pressure.
        """
        self._forget()
        if not any(self._plans):
            return "plain"
        free = self._spare(_TRIES)
        self._drop(free)
        random = any(plan is not None and plan.needs_random for plan in self._plans)
        if random:
            self._advise(libc.MADV_RANDOM)
        exact = self._lane.exact([e for expert in free for e in self.layout.extents(expert)])
        # Pages on their way cannot be dropped.
        self.wait(free)
        self._drop(free)
        if not exact:
            log.info(
                "reading by WILLNEED: large folios %s", "read too much" if exact is False else "could not be tried"
            )
            self._lane.plain()
            self._side.plain()
            if random:
                self._advise(libc.MADV_NORMAL)
            return "plain"
        return "windows"

    def _forget(self) -> None:
        """DONTNEED on what is not cached: drops nothing but the kernel's own notes."""
        for moe in self.layout.layers:
            for t in moe.tensors:
                whole = Extent(t.file, t.offset, t.stride * moe.n_experts)
                extents = [whole] if self._is_absent(whole) else (t.extent(i) for i in range(moe.n_experts))
                for start, end in ranges.merge((e.offset, e.end) for e in extents if self._is_absent(e)):
                    first, last = ranges.owned(start, end, libc.PAGE)
                    os.posix_fadvise(self.mapping.files[t.file].fd, first, last - first, os.POSIX_FADV_DONTNEED)

    def _is_absent(self, e: Extent) -> bool:
        """Whether it owns pages and none of them is known to be cached."""
        first, last = ranges.owned(e.offset, e.end, libc.PAGE)
        return last > first and resident_pages(self.mapping.files[e.file], first, last - first) == 0

    def _spare(self, count: int) -> list[int]:
        """Experts that nobody holds, those first that are hardly cached."""
        free: list[int] = []
        cached: list[int] = []
        for moe in self.layout.layers:
            base, borders = moe.layer * self._n, 2 * len(moe.tensors) * libc.PAGE
            for expert in range(base, base + moe.n_experts, max(1, moe.n_experts // 4)):
                if not self.held[expert]:
                    there = resident_bytes(self.mapping, self.layout.extents(expert)) or 0
                    (free if there <= borders else cached).append(expert)
            if len(free) >= count:
                break
        return sorted((free + cached)[:count])

    def close(self) -> None:
        """Give descriptors and advice back; locks go with the mapping."""
        self._lane.close()
        self._side.close()

    def _advise(self, advice: int) -> None:
        """Advice on all stacked tensors, wholly owned pages only."""
        for moe in self.layout.layers:
            for t in moe.tensors:
                start, end = ranges.owned(t.offset, t.offset + t.stride * moe.n_experts, libc.PAGE)
                libc.madvise(self.mapping.files[t.file].base + start, end - start, advice)

    def fetch(self, experts: Sequence[int]) -> None:
        """Start reading these experts (ids ascending), without waiting: gates, then ups, then downs, layer by layer.

        Engine thread. Costs a few system calls an expert; call it only with something to fetch.
        """
        self._fetch(experts, self._lane)

    def prefetch(self, experts: Sequence[int]) -> None:
        """As `fetch`, for the worker's thread."""
        self._fetch(experts, self._side)

    def _fetch(self, experts: Sequence[int], lane: windows.Lane) -> None:
        started, counters, held, n = perf_counter_ns(), self.counters, self.held, self._n
        for expert in experts:
            held[expert] = 1
        i, count = 0, len(experts)
        while i < count:
            layer = experts[i] // n
            j = i + 1
            while j < count and experts[j] // n == layer:
                j += 1
            self._fetch_layer(layer, experts[i:j] if j - i < count else experts, lane)
            i = j
        counters.fetches += 1
        counters.fetched_experts += count
        counters.fetch_ns += perf_counter_ns() - started

    def _fetch_layer(self, layer: int, experts: Sequence[int], lane: windows.Lane) -> None:
        nbytes = 0
        for file, start, end in self._runs(layer, experts):
            lane.read(file, start, end)
            nbytes += end - start
        self.counters.fetch_bytes += nbytes

    def _runs(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(file, start, end) of what to read of one layer's experts, in matmul order."""
        first, count = layer * self._n, len(experts)
        for t in self._tensors[layer]:
            base, stride, merges = t.offset - first * t.stride, t.stride, t.merges
            i = 0
            while i < count:
                expert, run = experts[i], 1
                i += 1
                while merges and i < count and experts[i] == expert + run:
                    i, run = i + 1, run + 1
                start = base + expert * stride
                yield t.file, start, start + run * stride

    def exchange(self, layer: int, experts: Sequence[int], out: Sequence[int], ahead_nbytes: int) -> None:
        """As `fetch`, of one layer, with the experts `out` dropped in step: what was read is never more than
        `ahead_nbytes` ahead of what was dropped. For a prompt, whose layers are larger than any reserve of memory."""
        started, counters, lane = perf_counter_ns(), self.counters, self._lane
        for expert in experts:
            self.held[expert] = 1
        self.release(out)
        at, ahead = 0, 0
        for file, start, end in self._runs(layer, experts):
            ahead += end - start
            while ahead > ahead_nbytes and at < len(out):
                ahead -= self.drop_released(out[at : at + _DROPPED_AT_ONCE])
                at += _DROPPED_AT_ONCE
            lane.read(file, start, end)
            counters.fetch_bytes += end - start
        self.drop_released(out[at:])
        counters.fetches += 1
        counters.fetched_experts += len(experts)
        counters.fetch_ns += perf_counter_ns() - started

    def fetch_extents(self, extents: Iterable[Extent]) -> None:
        """Start reading ranges in the order given (dense weights, merged neighbours). Worker's thread."""
        for e in extents:
            self.counters.fetch_bytes += e.nbytes
            self._side.read(e.file, e.offset, e.end, marks=False)

    def wait(self, experts: Sequence[int]) -> None:
        """Return when the experts' pages are there and mapped. Fetch them first: this one reads as a fault does."""
        self.wait_extents(e for expert in experts for e in self.layout.extents(expert))

    def wait_extents(self, extents: Iterable[Extent]) -> None:
        """As `wait`. ModelReadError where the disk does not give them.

        On a kernel before 5.14 a byte of each page is read through the descriptor instead."""
        started = perf_counter_ns()
        for e in extents:
            f = self.mapping.files[e.file]
            start, end = ranges.span(e.offset, e.end, libc.PAGE)
            code = libc.madvise(f.base + start, end - start, libc.MADV_POPULATE_READ)
            if code == errno.EINVAL:
                for at in range(start, min(end, f.nbytes), libc.PAGE):
                    os.pread(f.fd, 1, at)
            elif code == errno.EFAULT:
                raise f.unreadable_in(start, end)
            elif code:
                self.counters.wait_errors += 1
        self.counters.waits += 1
        self.counters.wait_ns += perf_counter_ns() - started

    def hold(self, experts: Iterable[int]) -> None:
        """Experts that are resident without a fetch (adopted at start): their borders are theirs from now on."""
        for expert in experts:
            self.held[expert] = 1

    def release(self, experts: Iterable[int]) -> None:
        """Give experts up for `drop_released` to drop. Engine thread; a fetch before that takes one back."""
        for expert in experts:
            self.held[expert] = 0

    def drop_released(self, experts: Sequence[int]) -> int:
        """Drop those of the experts that are still released and not pinned. Returns bytes asked to go."""
        held, pinned = self.held, self._pinned
        return self._drop([e for e in experts if not held[e] and e not in pinned])

    def evict(self, experts: Sequence[int]) -> int:
        """`release` and `drop_released` at once."""
        self.release(experts)
        return self.drop_released(experts)

    def _drop(self, experts: Sequence[int]) -> int:
        if not experts:
            return 0
        started, total = perf_counter_ns(), 0
        by_layer: dict[int, list[int]] = {}
        for expert in experts:
            by_layer.setdefault(expert // self._n, []).append(expert % self._n)
        for layer, indices in by_layer.items():
            for t in self._tensors[layer]:
                for start, end in ranges.merge(self._free_range(t, layer * self._n, index) for index in indices):
                    total += self._drop_range(self.mapping.files[t.file], start, end)
        self.counters.evicted_experts += len(experts)
        self.counters.evict_ns += perf_counter_ns() - started
        return total

    def _free_range(self, t: _Tensor, first: int, index: int) -> tuple[int, int]:
        """File range of whole pages that go with the expert: its own, and borders whose other side is out too."""
        page, start = libc.PAGE, t.offset + index * t.stride
        own, end = ranges.owned(start, start + t.stride, page)
        if t.stride < page:
            return own, end
        held = self.held
        if index and start % page and not held[first + index - 1]:
            own = ranges.floor(start, page)
        if index + 1 < t.count and (start + t.stride) % page and not held[first + index + 1]:
            end = ranges.ceil(start + t.stride, page)
        return own, end

    def _drop_range(self, f: MappedFile, start: int, end: int) -> int:
        self.counters.evict_calls += 1
        # A mapped page survives the fadvise, so the mapping goes first.
        code = libc.madvise(f.base + start, end - start, libc.MADV_DONTNEED)
        if code:
            self.counters.evict_errors += 1
        try:
            os.posix_fadvise(f.fd, start, end - start, os.POSIX_FADV_DONTNEED)
        except OSError:
            self.counters.evict_errors += 1
            return 0
        self.counters.evict_bytes += end - start
        return end - start

    def drop_extents(self, extents: Iterable[Extent]) -> int:
        """Drop the wholly owned pages of ranges. Returns bytes asked to go."""
        total = 0
        for e in ranges.merge_extents(extents):
            start, end = ranges.owned(e.offset, e.end, libc.PAGE)
            if end > start:
                total += self._drop_range(self.mapping.files[e.file], start, end)
        return total

    def drop_files(self) -> None:
        """Drop all of the model, headers too. Pages that another process maps stay."""
        for f in self.mapping.files:
            self._drop_range(f, 0, ranges.ceil(f.nbytes, libc.PAGE))

    def pin(self, experts: Sequence[int]) -> list[int]:
        """Read in and lock experts until the limit; returns those that are locked now. Never raises for a limit."""
        self.hold(experts)
        fresh = [e for e in experts if e not in self._pinned]
        if fresh:
            self.prefetch(sorted(fresh))
        done = []
        for expert in experts:
            if expert in self._pinned or self._lock(self.layout.extents(expert)):
                self._pinned.add(expert)
                done.append(expert)
            else:
                break
        return done

    def unpin(self, experts: Iterable[int]) -> int:
        """Unlock experts; pages shared with one that stays pinned stay locked. Returns how many were pinned.

        One that was released while it was pinned could not be dropped then: it is dropped now.
        """
        done = [e for e in dict.fromkeys(experts) if e in self._pinned]
        for expert in done:
            self._pinned.discard(expert)
            self.locks.unlock(self._exact(self.layout.extents(expert)))
        self.drop_released(done)
        return len(done)

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(self._pinned)

    def _lock(self, extents: Iterable[Extent]) -> bool:
        exact = list(self._exact(extents))
        code = self.locks.lock(exact)
        if code:
            self._refused(code, sum(end - start for start, end in exact))
        return code == 0

    def _refused(self, code: int, nbytes: int) -> None:
        self.lock_refusal = reason(code, nbytes)
        self.counters.lock_errors[self.lock_refusal] += 1

    def lock_extents(self, extents: Iterable[Extent]) -> LockReport:
        """Read in and lock ranges (the dense weights) as far as the limit lets; the rest stays readable, unlocked."""
        wanted = list(self.mapping.clip(ranges.merge_extents(extents)))
        self.fetch_extents(wanted)
        report = self.locks.lock_most(list(self._exact(wanted)))
        if report.got_bytes < report.wanted_bytes:
            self._refused(report.code, report.wanted_bytes - report.got_bytes)
            log.warning("%s", report.warning())
        return report

    def unlock_extents(self, extents: Iterable[Extent], nbytes: int) -> None:
        """Undo a `lock_extents` that got `nbytes`; the pages stay until somebody needs the memory."""
        self.locks.unlock_most(self._exact(self.mapping.clip(ranges.merge_extents(extents))), nbytes)

    @property
    def fetch_errors(self) -> int:
        """Reads that the kernel refused; such pages are read by faults."""
        return self._lane.errors + self._side.errors

    @property
    def fetch_calls(self) -> int:
        """System calls made to read."""
        return self._lane.calls + self._side.calls

    @property
    def windows(self) -> int:
        """Reads that went in large folios."""
        return self._lane.windows + self._side.windows

    def _exact(self, extents: Iterable[Extent]) -> Iterable[tuple[int, int]]:
        for e in extents:
            base = self.mapping.files[e.file].base
            yield base + e.offset, base + e.end
