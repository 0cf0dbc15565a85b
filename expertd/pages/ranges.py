"""Pure arithmetic of pages: the span that an extent touches, the part it owns alone, merging, chunking.

GGUF aligns tensors to 32 bytes, so neighbouring experts share the page at their border. Nothing here calls the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from expertd.types import Extent


def floor(value: int, step: int) -> int:
    return value // step * step


def ceil(value: int, step: int) -> int:
    return -(-value // step) * step


def span(start: int, end: int, page: int) -> tuple[int, int]:
    """Whole pages that the bytes [start, end) touch."""
    return floor(start, page), ceil(end, page)


def owned(start: int, end: int, page: int) -> tuple[int, int]:
    """Whole pages inside [start, end): no byte of a neighbour lies in them. Empty (equal ends) for less than a page."""
    first, last = ceil(start, page), floor(end, page)
    return (first, last) if last > first else (first, first)


def merge(ranges: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Sorted ranges, joined where they overlap, touch or are at most `gap` apart; empty ones go."""
    done: list[tuple[int, int]] = []
    for start, end in sorted(r for r in ranges if r[1] > r[0]):
        if done and start <= done[-1][1] + gap:
            if end > done[-1][1]:
                done[-1] = (done[-1][0], end)
        else:
            done.append((start, end))
    return done


def merge_extents(extents: Iterable[Extent], gap: int = 0) -> list[Extent]:
    """As `merge`, file by file."""
    by_file: dict[int, list[tuple[int, int]]] = {}
    for e in extents:
        by_file.setdefault(e.file, []).append((e.offset, e.end))
    return [Extent(file, start, end - start) for file in sorted(by_file) for start, end in merge(by_file[file], gap)]


def chunks(start: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, nbytes) pieces of at most `chunk` bytes that end on multiples of it."""
    while start < end:
        stop = min(end, floor(start, chunk) + chunk)
        yield start, stop - start
        start = stop
