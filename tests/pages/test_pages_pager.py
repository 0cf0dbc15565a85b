"""Fetching, dropping and reading in windows on a real file: exactly what was asked is there, and no more."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.pages import libc, ranges, residency, windows
from expertd.pages.disk import ReadLimits
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.windows import Lane, Plan, plan_for
from expertd.types import ExpertLayout, Extent

pytestmark = pytest.mark.linux65


@pytest.fixture
def on_large(large: ExpertLayout) -> Iterator[Pager]:
    yield from _pager(large)


@pytest.fixture
def on_small(small: ExpertLayout) -> Iterator[Pager]:
    yield from _pager(small)


def _pager(layout: ExpertLayout) -> Iterator[Pager]:
    with MappedFiles.map(layout.files) as mapping:
        pager = Pager(layout, mapping)
        pager.drop_files()
        yield pager
        pager.close()


def _cached(pager: Pager) -> set[int]:
    """Pages of the first file that are in the cache, arrived or on their way."""
    f = pager.mapping.files[0]
    found = set()
    for page in range(-(-f.nbytes // libc.PAGE)):
        if residency.resident_pages(f, page * libc.PAGE, 1):
            found.add(page)
    return found


def _touched(layout: ExpertLayout, experts: list[int]) -> set[int]:
    pages: set[int] = set()
    for expert in experts:
        for e in layout.extents(expert):
            first, last = ranges.span(e.offset, e.end, libc.PAGE)
            pages.update(range(first // libc.PAGE, last // libc.PAGE))
    return pages


def test_a_fetch_reads_exactly_its_experts(on_large: Pager) -> None:
    mode = on_large.calibrate()
    left = _cached(on_large)
    assert len(left) <= 6, "calibration may leave the borders of whole tensors"
    experts = [0, 3, 4, 15, 16, 31]
    on_large.fetch(experts)
    on_large.wait(experts)
    assert _cached(on_large) == _touched(on_large.layout, experts) | left
    assert on_large.fetch_errors == on_large.counters.wait_errors == 0
    assert on_large.counters.fetched_experts == len(experts)
    assert on_large.counters.fetch_bytes == 3 * 700_032 * len(experts)
    assert (on_large.windows > 0) == (mode == "windows")


def test_an_exchange_drops_in_step_with_what_it_reads(on_large: Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    on_large.calibrate()
    out, experts, allowed = list(range(16, 28)), list(range(12)), 2 << 20
    on_large.prefetch(out)
    on_large.wait(out)
    left = _cached(on_large) - _touched(on_large.layout, out)
    ahead, most, order = 0, 0, []
    drop, read = on_large.drop_released, on_large._lane.read

    def dropping(some: list[int]) -> int:
        nonlocal ahead
        gone = drop(some)
        ahead -= gone
        return gone

    def reading(file: int, start: int, end: int) -> None:
        nonlocal ahead, most
        ahead += end - start
        most = max(most, ahead)
        order.append(start)
        read(file, start, end)

    monkeypatch.setattr(on_large, "drop_released", dropping)
    monkeypatch.setattr(on_large._lane, "read", reading)
    on_large.exchange(0, experts, out, allowed)
    assert most <= allowed
    assert order == sorted(order), "the order of the matmul: all gates, all ups, all downs"
    on_large.wait(experts)
    assert _cached(on_large) - left <= _touched(on_large.layout, experts) | _borders(on_large.layout, out)
    assert _touched(on_large.layout, experts) <= _cached(on_large)
    assert on_large.counters.fetched_experts == len(out) + len(experts)


def _borders(layout: ExpertLayout, experts: list[int]) -> set[int]:
    """First and last pages of the experts' tensors, which others may share."""
    return {at // libc.PAGE for expert in experts for e in layout.extents(expert) for at in (e.offset, e.end - 1)}


def test_calibration_leaves_what_is_cached(on_small: Pager, on_large: Pager) -> None:
    for pager, tried in ((on_small, 0), (on_large, 4)):
        experts = [e for e in range(len(pager.held)) if pager.layout.expert_sizes[e]]
        pager.prefetch(experts)
        pager.wait(experts)
        pager.release(experts)
        pager.calibrate()
        there = residency.resident_experts(pager.mapping, pager.layout)
        assert there is not None
        assert len(there) >= len(experts) - tried


def test_a_second_fetch_reads_nothing(on_large: Pager) -> None:
    on_large.calibrate()
    on_large.fetch([1, 2])
    on_large.wait([1, 2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    on_large.fetch([1, 2])
    on_large.wait([1, 2])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before


def test_the_bytes_are_those_of_the_file(on_large: Pager) -> None:
    on_large.calibrate()
    on_large.fetch([5])
    on_large.wait([5])
    f = on_large.mapping.files[0]
    for e in on_large.layout.extents(5):
        assert libc.ctypes.string_at(f.base + e.offset, e.nbytes) == os.pread(f.fd, e.nbytes, e.offset)


def test_small_experts_that_follow_each_other_go_in_one_call(on_small: Pager) -> None:
    on_small.fetch([2, 3, 4, 9])
    on_small.wait([2, 3, 4, 9])
    assert _cached(on_small) == _touched(on_small.layout, [2, 3, 4, 9])
    assert on_small.fetch_calls == 3 * 2


def test_an_eviction_leaves_the_borders_of_a_neighbour_that_is_held(on_small: Pager) -> None:
    on_small.fetch([1, 2, 3])
    on_small.wait([1, 2, 3])
    on_small.evict([2])
    assert _cached(on_small) == _touched(on_small.layout, [1, 3])
    on_small.evict([1])
    on_small.evict([3])
    assert _cached(on_small) == set()
    assert on_small.counters.evict_errors == 0


def test_neighbours_are_evicted_with_the_border_between_them(on_small: Pager) -> None:
    on_small.fetch([4, 5])
    on_small.wait([4, 5])
    on_small.evict([4, 5])
    assert _cached(on_small) == set()


def test_the_border_of_a_whole_tensor_stays(on_small: Pager) -> None:
    dense = on_small.layout.dense
    on_small.fetch_extents(dense)
    on_small.fetch([0])
    on_small.wait_extents(dense)
    on_small.wait([0])
    on_small.evict([0])
    first, last = ranges.span(dense[0].offset, dense[0].end, libc.PAGE)
    assert set(range(first // libc.PAGE, last // libc.PAGE)) <= _cached(on_small)


def test_a_fetch_before_its_turn_takes_an_eviction_back(on_small: Pager) -> None:
    on_small.fetch([6])
    on_small.wait([6])
    on_small.release([6])
    on_small.fetch([6])
    assert on_small.drop_released([6]) == 0
    assert _cached(on_small) == _touched(on_small.layout, [6])


def test_residency_by_expert_is_true(on_small: Pager) -> None:
    assert residency.resident_experts(on_small.mapping, on_small.layout) == []
    on_small.fetch([0, 7, 8])
    on_small.wait([0, 7, 8])
    assert residency.resident_experts(on_small.mapping, on_small.layout) == [0, 7, 8]
    on_small.fetch(list(range(8)))
    on_small.wait(list(range(8)))
    assert residency.resident_experts(on_small.mapping, on_small.layout) == list(range(9))
    assert residency.resident_bytes(on_small.mapping, on_small.layout.extents(3)) == 3 * 50_001


@pytest.mark.parametrize("ahead_kb", [128, 512, 4096, 8192])
@pytest.mark.parametrize("pages", [60, 111, 216, 700, 2600])
def test_the_size_of_a_window_is_what_was_wanted_at_most(ahead_kb: int, pages: int, large: ExpertLayout) -> None:
    plan = plan_for(ReadLimits(ahead_kb, 1280, True), pages * libc.PAGE)
    if plan is None:
        return
    with MappedFiles.map(large.files) as mapping:
        lane = Lane(mapping, [plan], plan.chunk_bytes)
        for first in (1, 37, 511, 2049):
            ask, size = lane._size(0, plan, first, pages)
            assert 0 <= size <= pages
            assert (ask > 0) == (size > 0)
        lane.close()


def test_where_windows_gain_nothing_there_are_none() -> None:
    assert plan_for(ReadLimits(128, 1280, False), 1 << 20) is None
    assert plan_for(ReadLimits(128, 1280, True), 13_000) is None
    assert plan_for(ReadLimits(0, 1280, True), 1 << 20) is None
    assert plan_for(ReadLimits(128, 128, True), 1 << 20) is None
    assert plan_for(ReadLimits(128, 1280, True), 1 << 20) == Plan(32, 320, False, 48)
    assert plan_for(ReadLimits(8192, 1280, True), 1 << 20) == Plan(2048, 320, True, 48)


def test_a_kernel_that_reads_too_much_is_found_out(large: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are a hundred pages longer than planned stand for a kernel with other rules."""
    with MappedFiles.map(large.files) as mapping:
        pager = Pager(large, mapping)
        pager.drop_files()
        if not any(pager._plans):
            pytest.skip("this disk's limits allow no windows")
        real = windows._read_bytes
        calls = iter(range(1000))
        monkeypatch.setattr(windows, "_read_bytes", lambda: real() + (next(calls) % 2) * 400_000)
        assert pager.calibrate() == "plain"
        before = pager.windows
        pager.fetch([1])
        pager.wait([1])
        assert pager.windows == before
        assert residency.resident_experts(mapping, large) == [1]
        pager.close()


def test_extents_of_several_files(scratch: Path, small: ExpertLayout, large: ExpertLayout) -> None:
    with MappedFiles.map([*small.files, *large.files]) as mapping:
        lane = Lane(mapping, [None, None], 128 << 10)
        for f in mapping.files:
            os.posix_fadvise(f.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        lane.read(1, 5_000, 900_000)
        assert residency.resident_pages(mapping.files[0], 0, mapping.files[0].nbytes) == 0
        assert residency.resident_bytes(mapping, [Extent(1, 5_000, 895_000)]) == 895_000
        lane.close()
