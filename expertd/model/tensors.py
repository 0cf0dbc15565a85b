"""Tensor entries of one file and where their bytes lie: absolute offsets, sizes, overlaps, what is cut off.

Not here: reading the entries (`header`), what the tensors are for (`names`).
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.model.cursor import Cursor, quote
from expertd.model.ggml_types import AMBIGUOUS, GGML_TYPES, type_name


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in ggml's order, the row first; `offset` counts from the start of file number `file`."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    by_gap: bool = False
    """The size comes from the distance to the next tensor, since the type's own size is unknown."""

    @property
    def type_name(self) -> str:
        return type_name(self.type_id)

    @property
    def n_elements(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header has it: `offset` counts from the start of the data."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int


def place(
    at: Cursor, entries: list[Entry], data_offset: int, alignment: int, number: int
) -> tuple[tuple[TensorInfo, ...], list[str]]:
    """Absolute offsets and sizes; every tensor within the file and clear of the next one.

    1. Offsets lie on the alignment. 2. No tensor reaches into the next. 3. The last byte of all is in the file.
    """
    room = max(0, at.size - data_offset)
    placed: dict[str, TensorInfo] = {}
    following: Entry | None = None
    short, unused = (0, ""), 0
    for e in sorted(entries, key=lambda e: e.offset, reverse=True):
        if e.offset % alignment:
            raise at.fail(f"tensor {quote(e.name)} starts at {e.offset}, no multiple of the alignment {alignment}")
        gap = (room if following is None else following.offset) - e.offset
        info = _sized(at, e, gap, alignment, number, data_offset)
        if following is not None:
            if info.nbytes > gap:
                raise at.fail(
                    f"tensor {quote(e.name)} takes {info.nbytes} bytes, but {quote(following.name)} starts "
                    f"{gap} bytes after it"
                )
            unused += gap - -(-info.nbytes // alignment) * alignment
        short = max(short, (info.end - at.size, e.name))
        placed[e.name], following = info, e
    if short[0] > 0:
        raise at.fail(
            f"tensor {quote(short[1])} ends at byte {at.size + short[0]}, the file has {at.size}: "
            f"short by {short[0]} bytes"
        )
    unused += following.offset if following is not None else 0
    warnings = [f"{unused} bytes between tensors belong to none: llama.cpp refuses such a file"] if unused else []
    tensors = tuple(placed[e.name] for e in entries)
    return tensors, warnings + _gap_warnings(tensors)


def _sized(at: Cursor, e: Entry, gap: int, alignment: int, number: int, data_offset: int) -> TensorInfo:
    known = GGML_TYPES.get(e.type_id)
    n = 1
    for d in e.shape:
        n *= d
    if known is None:
        nbytes = _gap_nbytes(max(0, gap), e.shape, alignment) if n else 0
        return TensorInfo(e.name, e.type_id, e.shape, number, data_offset + e.offset, nbytes, by_gap=True)
    row = e.shape[0] if e.shape else 1
    if row % known.block:
        raise at.fail(f"tensor {quote(e.name)} has rows of {row} elements, no whole {known.name} blocks")
    nbytes = n // known.block * known.block_nbytes
    return TensorInfo(e.name, e.type_id, e.shape, number, data_offset + e.offset, nbytes)


def _gap_nbytes(gap: int, shape: tuple[int, ...], alignment: int) -> int:
    """The gap less its padding: a tensor is whole rows, so what is left of the rows is padding if that short."""
    rows = 1
    for d in shape[1:]:
        rows *= d
    rest = gap % rows if rows else 0
    return gap - rest if rest < alignment else gap


def _gap_warnings(tensors: tuple[TensorInfo, ...]) -> list[str]:
    by_id: dict[int, list[TensorInfo]] = {}
    for t in tensors:
        if t.by_gap:
            by_id.setdefault(t.type_id, []).append(t)
    return [
        f"{len(found)} tensors of type {type_id} ({AMBIGUOUS.get(type_id, 'unknown')}), sized by the gap to the next: "
        f"{sum(t.nbytes for t in found)} bytes, first {quote(found[0].name)}"
        for type_id, found in sorted(by_id.items())
    ]
