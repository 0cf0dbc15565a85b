"""The data that crosses floors: where an expert's bytes lie, and in which phase a token is.

An expert is one (layer, index). On hot paths it is a plain int, its *expert id*: `layer * n_experts + index`, where
`n_experts` is the model's largest number of experts in a layer. Layers are block indices as in tensor names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path

ExpertId = int


class Phase(IntEnum):
    """What a route belongs to; the numbers are those of recorded traces."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` bytes at `offset` of file number `file` of the model (0 for a model in one file)."""

    file: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One stacked tensor of experts: expert `i` has the `stride` bytes at `offset + i * stride`."""

    role: str
    """gate, up, gate_up or down; other roles (chexps) keep the tensor's own word."""
    name: str
    file: int
    offset: int
    stride: int

    def extent(self, index: int) -> Extent:
        return Extent(self.file, self.offset + index * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """A layer that routes. `tensors` are in the order in which the matmuls read them: gate, up (or gate_up), down."""

    layer: int
    n_experts: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def expert_nbytes(self) -> int:
        return sum(t.stride for t in self.tensors)


@dataclass(frozen=True)
class ExpertLayout:
    """Where all of a model's weights lie, as far as steering needs it.

    `dense` covers every tensor byte that is no expert's (attention, norms, embeddings, router, shared experts, expert
    biases): merged, ascending, never overlapping an expert's extent. Blocks of multi-token prediction (nextn) are in
    neither part: an ordinary decode does not read them, and llama.cpp does not map them.
    """

    files: tuple[Path, ...]
    file_nbytes: tuple[int, ...]
    n_layers: int
    n_experts: int
    n_experts_used: int
    layers: tuple[MoeLayer, ...]
    dense: tuple[Extent, ...]

    def expert_id(self, layer: int, index: int) -> ExpertId:
        return layer * self.n_experts + index

    def place(self, expert: ExpertId) -> tuple[int, int]:
        """(layer, index) of an expert id."""
        return divmod(expert, self.n_experts)

    @cached_property
    def by_layer(self) -> dict[int, MoeLayer]:
        return {m.layer: m for m in self.layers}

    @cached_property
    def expert_sizes(self) -> list[int]:
        """Bytes by expert id; 0 where there is no such expert. Length `n_layers * n_experts`."""
        sizes = [0] * (self.n_layers * self.n_experts)
        for m in self.layers:
            base = m.layer * self.n_experts
            sizes[base : base + m.n_experts] = [m.expert_nbytes] * m.n_experts
        return sizes

    @cached_property
    def expert_nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(m.n_experts * m.expert_nbytes for m in self.layers)

    @cached_property
    def dense_nbytes(self) -> int:
        return sum(e.nbytes for e in self.dense)

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes of experts that one decoded token needs: k experts in each layer that routes."""
        return sum(min(self.n_experts_used, m.n_experts) * m.expert_nbytes for m in self.layers)

    def extents(self, expert: ExpertId) -> Iterator[Extent]:
        """The extents of one expert, in matmul order. KeyError when its layer does not route."""
        layer, index = self.place(expert)
        return (t.extent(index) for t in self.by_layer[layer].tensors)
