"""What of a model is in the page cache right now: true numbers, or None where the kernel will not tell.

1. cachestat(2): needs no mapping, tells the truth or EPERM.
2. On ENOSYS (before Linux 6.5) mincore, which lies to those who neither own nor may write the file: not asked then.
3. Else unknown. Unknown is said, never guessed.

Read by `warm`, by the adoption at start, and by tests. Which expert the cache believes resident lies in `cache`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from expertd.pages import libc, ranges
from expertd.pages.mapping import MappedFile, MappedFiles
from expertd.types import ExpertLayout, Extent


def truthful(file: MappedFile) -> bool:
    """Whether residency of this file can be known to this process."""
    answer = libc.cachestat(file.fd, 0, libc.PAGE)
    if not isinstance(answer, int):
        return True
    return answer == errno.ENOSYS and _may_ask_mincore(file)


def resident_pages(file: MappedFile, offset: int, nbytes: int) -> int | None:
    """Pages in the cache of those that the byte range touches, or None when it cannot be known."""
    first = offset // libc.PAGE * libc.PAGE
    length = -(-(offset + nbytes) // libc.PAGE) * libc.PAGE - first
    answer = libc.cachestat(file.fd, first, length)
    if not isinstance(answer, int):
        return answer.cached
    if answer != errno.ENOSYS or not _may_ask_mincore(file):
        return None
    vector = libc.mincore(file.base + first, length)
    return None if vector is None else sum(byte & 1 for byte in vector)


def usable_pages(file: MappedFile, offset: int, nbytes: int) -> int | None:
    """As `resident_pages`, less those whose read failed or is not over: such pages are in the cache as well, and only
    mincore tells them apart."""
    pages = resident_pages(file, offset, nbytes)
    if not pages or not _may_ask_mincore(file):
        return pages
    first, last = ranges.span(offset, offset + nbytes, libc.PAGE)
    vector = libc.mincore(file.base + first, last - first)
    return pages if vector is None else min(pages, sum(byte & 1 for byte in vector))


def recently_evicted_pages(file: MappedFile, offset: int, nbytes: int) -> int | None:
    """Pages of a range that were dropped so lately that the kernel still remembers them. None when unknown."""
    answer = libc.cachestat(file.fd, offset, nbytes)
    return None if isinstance(answer, int) else answer.recently_evicted


def resident_bytes(mapping: MappedFiles, extents: Iterable[Extent]) -> int | None:
    """Bytes of the extents that are in the cache, a page's worth less for each page that is not, so never too many;
    None when any is unknown."""
    total = 0
    for e in extents:
        pages = resident_pages(mapping.files[e.file], e.offset, e.nbytes)
        if pages is None:
            return None
        first, last = ranges.span(e.offset, e.end, libc.PAGE)
        total += max(0, e.nbytes - (last - first) + pages * libc.PAGE)
    return total


def resident_experts(mapping: MappedFiles, layout: ExpertLayout, share: float = 0.98) -> list[int] | None:
    """Ids of the experts of which at least `share` of the bytes are in the cache, ascending; None when unknown.

    A stacked tensor that is wholly out costs one call; one that is wholly in, too; the rest one call an expert.
    """
    found: list[int] = []
    for moe in layout.layers:
        base, states = moe.layer * layout.n_experts, [_tensor_state(mapping, t.file, t.offset, t.stride, moe.n_experts)
                                                       for t in moe.tensors]  # fmt: skip
        if None in states:
            return None
        if "out" in states:
            continue
        if all(s == "in" for s in states):
            found.extend(range(base, base + moe.n_experts))
            continue
        for index in range(moe.n_experts):
            nbytes = resident_bytes(mapping, (t.extent(index) for t in moe.tensors))
            if nbytes is None:
                return None
            if nbytes >= share * moe.expert_nbytes:
                found.append(base + index)
    return found


def _tensor_state(mapping: MappedFiles, file: int, offset: int, stride: int, count: int) -> str | None:
    nbytes = stride * count
    pages = resident_pages(mapping.files[file], offset, nbytes)
    if pages is None:
        return None
    if pages * libc.PAGE < stride // 2:
        return "out"
    return "in" if pages * libc.PAGE >= nbytes else "mixed"


def _may_ask_mincore(file: MappedFile) -> bool:
    return os.geteuid() in (0, os.fstat(file.fd).st_uid) or os.access(file.path, os.W_OK, effective_ids=True)
