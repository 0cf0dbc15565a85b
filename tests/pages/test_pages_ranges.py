"""Page arithmetic against sets of pages."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from expertd.pages import ranges
from expertd.types import Extent

PAGE = 16
bounds = st.tuples(st.integers(0, 400), st.integers(0, 100)).map(lambda x: (x[0], x[0] + x[1]))


@given(bounds)
def test_span_covers_and_owned_is_covered(r: tuple[int, int]) -> None:
    start, end = r
    first, last = ranges.span(start, end, PAGE)
    assert first % PAGE == last % PAGE == 0
    assert first <= start <= end <= last
    assert start - first < PAGE
    assert last - end < PAGE
    own, out = ranges.owned(start, end, PAGE)
    assert own == out or start <= own < out <= end
    assert out - own >= end - start - 2 * PAGE + 2 or own == out


@given(st.lists(bounds, max_size=20), st.integers(0, 5))
def test_merge_keeps_every_byte_and_nothing_overlaps(rs: list[tuple[int, int]], gap: int) -> None:
    merged = ranges.merge(rs, gap)
    before = {b for start, end in rs for b in range(start, end)}
    after = {b for start, end in merged for b in range(start, end)}
    assert before <= after
    assert merged == sorted(merged)
    assert all(b[0] - a[1] > gap for a, b in pairwise(merged))
    if gap == 0:
        assert before == after


@given(bounds, st.integers(1, 64))
def test_chunks_cover_in_order(r: tuple[int, int], chunk: int) -> None:
    start, end = r
    at = start
    for piece, nbytes in ranges.chunks(start, end, chunk):
        assert piece == at
        assert 0 < nbytes <= chunk
        at += nbytes
    assert at == max(start, end)


def test_extents_merge_by_file() -> None:
    merged = ranges.merge_extents([Extent(1, 5, 5), Extent(0, 10, 5), Extent(0, 0, 10), Extent(1, 20, 1)])
    assert merged == [Extent(0, 0, 15), Extent(1, 5, 5), Extent(1, 20, 1)]
