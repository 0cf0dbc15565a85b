"""How ggml lays the tensors of a graph out in one buffer, so that the buffer's size can be told without ggml.

The rules are those of ggml-alloc.c: inputs first, then nodes in order; a node takes over its first parent's place when
the operation works in place, the size is the same and nobody else reads the parent; otherwise the smallest free block
that fits, the open end last; a parent's place is free once its last reader is done. Not here: which nodes a model has
(`drawing`).
"""

from __future__ import annotations

from collections.abc import Sequence

_ALIGNMENT = 64


class Node:
    """One tensor of the graph: `nbytes`, what it reads, and whether it is a view, an input or in place."""

    __slots__ = ("allocated", "in_place", "is_input", "nbytes", "offset", "readers", "sources", "view_of", "views")

    def __init__(
        self,
        nbytes: int,
        sources: Sequence[Node] = (),
        *,
        in_place: bool = False,
        view_of: Node | None = None,
        is_input: bool = False,
    ) -> None:
        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.sources = tuple(sources)
        self.in_place, self.is_input = in_place, is_input
        self.view_of: Node | None = (view_of.view_of or view_of) if view_of is not None else None
        self.readers = self.views = 0
        self.allocated = False
        self.offset = 0


class _Space:
    """Free blocks in order of address, the last one open."""

    def __init__(self) -> None:
        self.free: list[list[int]] = [[0, 1 << 62]]
        self.peak = 0

    def take(self, nbytes: int) -> int:
        best = self.free[-1]
        fitting = [b for b in self.free[:-1] if b[1] >= nbytes]
        if fitting:
            smallest = min(b[1] for b in fitting)
            best = next(b for b in reversed(fitting) if b[1] == smallest)
        offset = best[0]
        best[0] += nbytes
        best[1] -= nbytes
        if not best[1]:
            self.free.remove(best)
        self.peak = max(self.peak, offset + nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        self.free.append([offset, nbytes])
        self.free.sort()
        merged: list[list[int]] = []
        for block in self.free:
            if merged and merged[-1][0] + merged[-1][1] == block[0]:
                merged[-1][1] += block[1]
            else:
                merged.append(block)
        self.free = merged


def peak_nbytes(nodes: Sequence[Node], leaves: Sequence[Node] = ()) -> int:
    """Size of the buffer for the graph `nodes`, in the order of execution; `leaves` are inputs that nothing frees."""
    space = _Space()
    for leaf in leaves:
        leaf.offset, leaf.allocated = space.take(leaf.nbytes), True
    for node in nodes:
        if node.view_of is not None:
            node.view_of.views += 1
        for source in node.sources:
            source.readers += 1
            if source.is_input:
                _place(source, space)
    for node in nodes:
        for source in node.sources:
            _place(source, space)
        _place(node, space)
        for source in node.sources:
            _read(source, space)
    return space.peak


def _place(node: Node, space: _Space) -> None:
    if node.allocated or node.view_of is not None or not node.nbytes:
        return
    node.allocated = True
    if node.in_place:
        for parent in node.sources:
            # A view is never taken over: ggml asks whether the parent itself was allocated, and views are not.
            if parent.allocated and parent.nbytes == node.nbytes and parent.readers == 1 and not parent.views:
                node.offset, parent.allocated = parent.offset, False
                return
    node.offset = space.take(node.nbytes)


def _read(source: Node, space: _Space) -> None:
    """One reader of `source` is done."""
    source.readers -= 1
    if source.readers or source.views:
        return
    owner = source
    if source.view_of is not None:
        owner = source.view_of
        owner.views -= 1
        if owner.views or owner.readers:
            return
    if owner.allocated and owner.nbytes:
        space.give(owner.offset, owner.nbytes)
        owner.allocated = False
