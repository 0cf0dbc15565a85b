"""Bring a chosen part of a model into the page cache at the disk's speed, see whether it stayed, and lock it.

Dense weights first, then experts in the order given (hottest first), in batches that are read in the order of the
file; at the end what the kernel skipped is read once more. What is resident already is not read again, so that a
warm-up that was cut short goes on where it ended. Reads run ahead of the disk by `_AHEAD` bytes; the wait is for the
oldest. Progress is a plain object that another thread may look at; cancelling is not taking the next step.

Used by `expertd warm` without a daemon and by the daemon's worker. Which experts are hot is decided elsewhere.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from expertd.pages import libc, ranges, residency
from expertd.pages.locks import refusal_words
from expertd.pages.mapping import MappedFile
from expertd.pages.pager import Pager
from expertd.types import ExpertLayout, Extent
from expertd.units import format_size

_AHEAD = 64 << 20
_PIECE = 4 << 20
_SMALL = 192 << 10
_BATCH = 256 << 20


@dataclass(frozen=True, slots=True)
class Skip:
    """A part that is not resident or not locked, and why."""

    what: str
    nbytes: int
    why: str

    def json(self) -> dict[str, str | int]:
        return {"what": self.what, "bytes": self.nbytes, "why": self.why}


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What is to be resident: `dense` ranges, then `experts` by id, hottest first."""

    dense: tuple[Extent, ...]
    experts: tuple[int, ...]
    target_bytes: int
    skipped: tuple[Skip, ...]


@dataclass(slots=True)
class WarmProgress:
    """`done_bytes` of the target are behind; `read_bytes` of them came from the disk."""

    target_bytes: int
    done_bytes: int = 0
    read_bytes: int = 0
    locked_bytes: int = 0
    skipped: list[Skip] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is resident of the plan. `resident_bytes` is None, and `unknown_bytes` the target, where the kernel does
    not tell; `missing` says what is not there."""

    resident_bytes: int | None
    unknown_bytes: int
    missing: tuple[Skip, ...]


def plan_warm(
    layout: ExpertLayout, *, dense: bool = True, experts: Iterable[int] | None = None, budget_bytes: int | None = None
) -> WarmPlan:
    """Dense weights where wanted, and of `experts` (all in the order of the file when None) as many as the budget of
    expert bytes holds; an expert that does not fit any more ends it."""
    if experts is None:
        experts = (m.layer * layout.n_experts + i for m in layout.layers for i in range(m.n_experts))
    sizes, chosen, left, total, out, outs = layout.expert_sizes, [], budget_bytes, 0, 0, 0
    for expert in experts:
        size = sizes[expert]
        if not size:
            continue
        if out or (left is not None and size > left):
            out, outs = out + size, outs + 1
            continue
        left = left - size if left is not None else None
        total += size
        chosen.append(expert)
    skipped = []
    if out:
        what = "1 expert" if outs == 1 else f"{outs} experts"
        skipped.append(Skip(what, out, f"beyond the budget of {format_size(budget_bytes or 0)}"))
    ranges_ = tuple(ranges.merge_extents(layout.dense)) if dense else ()
    return WarmPlan(ranges_, tuple(chosen), total + sum(e.nbytes for e in ranges_), tuple(skipped))


def warm_steps(pager: Pager, plan: WarmPlan, progress: WarmProgress, *, pin: bool = False) -> Iterator[None]:
    """Read the plan, some MiB a step. ModelReadError where the disk does not give a part of it. Worker's thread, or the
    only one. Where locking is wanted and a limit ends it, reading goes on without."""
    progress.skipped.extend(plan.skipped)
    reads = _Reads(pager, progress)
    for piece in _pieces(plan.dense):
        yield from reads.start([piece])
    yield from reads.finish()
    if pin and plan.dense:
        report = pager.lock_extents(plan.dense)
        progress.locked_bytes += report.got_bytes
        if report.got_bytes < report.wanted_bytes:
            left = report.wanted_bytes - report.got_bytes
            progress.skipped.append(Skip("locks of dense weights", left, report.warning()))
            pin = False
    sizes = pager.layout.expert_sizes
    for batch in _batches(plan.experts, sizes):
        pager.hold(batch)
        for e in _in_file_order(pager.layout, batch):
            yield from reads.start([e])
        if pin:
            yield from reads.finish()
            locked = pager.pin(batch)
            progress.locked_bytes += sum(sizes[e] for e in locked)
            if len(locked) < len(batch):
                pin = False
                left = sum(sizes[e] for e in plan.experts) - sum(sizes[e] for e in pager.pinned)
                progress.skipped.append(Skip("locks of experts", left, refusal_words(pager.lock_refusal)))
    yield from reads.finish()
    yield from _read_what_is_missing(pager, plan, progress)


def _read_what_is_missing(pager: Pager, plan: WarmPlan, progress: WarmProgress) -> Iterator[None]:
    """Read-ahead is a favour: where memory was short for a moment the kernel skips pages. A plain read insists."""
    buffer = bytearray(_PIECE)
    experts = (e for expert in plan.experts for e in pager.layout.extents(expert))
    for e in (*_pieces(plan.dense), *experts):
        f = pager.mapping.files[e.file]
        pages = residency.usable_pages(f, e.offset, e.nbytes)
        first, last = ranges.span(e.offset, e.end, libc.PAGE)
        if pages is None or pages * libc.PAGE >= last - first:
            continue
        for at, nbytes in ranges.chunks(e.offset, e.end, _PIECE):
            _read(f, memoryview(buffer)[:nbytes], at)
        progress.read_bytes += last - first - pages * libc.PAGE
        yield


def verify(pager: Pager, plan: WarmPlan) -> Verdict:
    """Ask the kernel what stayed."""
    wanted: list[tuple[str, Sequence[Extent]]] = [("dense weights", plan.dense)]
    wanted += [(f"experts of layer {layer}", extents) for layer, extents in _by_layer(pager.layout, plan.experts)]
    total, missing = 0, []
    for what, extents in wanted:
        found = residency.resident_bytes(pager.mapping, extents)
        if found is None:
            return Verdict(None, plan.target_bytes, ())
        total += found
        short = sum(e.nbytes for e in extents) - found
        if short:
            missing.append(Skip(what, short, "read, and taken again by the kernel: memory is short"))
    return Verdict(total, 0, tuple(missing))


class _Reads:
    """Reads under way, oldest first."""

    def __init__(self, pager: Pager, progress: WarmProgress) -> None:
        self._pager, self._progress = pager, progress
        self._waiting: deque[tuple[MappedFile, int, int]] = deque()
        self._ahead = 0

    def start(self, extents: Sequence[Extent]) -> Iterator[None]:
        files = self._pager.mapping.files
        for e in extents:
            pages = residency.resident_pages(files[e.file], e.offset, e.nbytes)
            first, last = ranges.span(e.offset, e.end, libc.PAGE)
            if pages is not None and pages * libc.PAGE >= last - first:
                self._progress.done_bytes += e.nbytes
                continue
            self._pager.fetch_extents([e])
            self._progress.read_bytes += e.nbytes - min(e.nbytes, (pages or 0) * libc.PAGE)
            self._waiting.append((files[e.file], e.end - 1, e.nbytes))
            self._ahead += e.nbytes
            while self._ahead > _AHEAD:
                self._wait()
            yield

    def finish(self) -> Iterator[None]:
        while self._waiting:
            self._wait()
            yield

    def _wait(self) -> None:
        file, last, nbytes = self._waiting.popleft()
        _read(file, memoryview(bytearray(1)), last)
        self._ahead -= nbytes
        self._progress.done_bytes += nbytes


def _read(file: MappedFile, buffer: memoryview, at: int) -> None:
    """ModelReadError where the disk does not give it."""
    try:
        os.preadv(file.fd, [buffer], at)
    except OSError as error:
        raise file.unreadable_in(ranges.floor(at, libc.PAGE), at + len(buffer)) from error


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    for e in extents:
        for start, nbytes in ranges.chunks(e.offset, e.end, _PIECE):
            yield Extent(e.file, start, nbytes)


def _batches(experts: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for expert in experts:
        batch.append(expert)
        nbytes += sizes[expert]
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _in_file_order(layout: ExpertLayout, experts: Sequence[int]) -> list[Extent]:
    """Extents by place; small neighbours that touch become one, large ones stay apart so that each is dropped whole."""
    done: list[Extent] = []
    for e in sorted((x for i in experts for x in layout.extents(i)), key=lambda x: (x.file, x.offset)):
        touches = done and done[-1].file == e.file and done[-1].end == e.offset
        if touches and e.nbytes < _SMALL and done[-1].nbytes < _PIECE:
            done[-1] = Extent(e.file, done[-1].offset, done[-1].nbytes + e.nbytes)
        else:
            done.append(e)
    return done


def _by_layer(layout: ExpertLayout, experts: Sequence[int]) -> list[tuple[int, list[Extent]]]:
    found: dict[int, list[Extent]] = {}
    for expert in experts:
        found.setdefault(layout.place(expert)[0], []).extend(layout.extents(expert))
    return sorted(found.items())
