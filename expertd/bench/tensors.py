"""Which tensors a geometry has in llama.cpp's architectures, with their shapes and types. Pure.

Names and shapes are those that llama.cpp's loaders ask for (src/models/ of the pinned release). Values are made in
`blocks`; metadata in `synth`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from expertd.bench.geometry import Geometry
from expertd.errors import UsageError
from expertd.model.ggml_types import GGML_TYPES, GgmlType

TYPE_IDS = {t.name: number for number, t in GGML_TYPES.items()}
# What llama.cpp's quantizer falls back to where a row does not divide into blocks of 256.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


class Fill(Enum):
    """What a tensor is filled with: random numbers that keep the scale of what passes through, or a constant."""

    RANDOM = "random"
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written. `shape` has the row, which is what a block divides, last."""

    name: str
    shape: tuple[int, ...]
    type: str
    fill: Fill = Fill.RANDOM

    @property
    def ggml_type(self) -> GgmlType:
        return GGML_TYPES[TYPE_IDS[self.type]]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_nbytes(self) -> int:
        return self.shape[-1] // self.ggml_type.block * self.ggml_type.block_nbytes

    @property
    def nbytes(self) -> int:
        return self.n_elements // self.shape[-1] * self.row_nbytes

    @property
    def deviation(self) -> float:
        """Standard deviation of random values: a product keeps the scale of what it multiplies."""
        return 1 / math.sqrt(self.shape[-1])

    @property
    def is_expert(self) -> bool:
        return "_exps." in self.name


def tensors(g: Geometry) -> Iterator[TensorSpec]:
    """Every tensor of the geometry, in the order in which it lies in the file."""
    yield _matrix("token_embd.weight", (g.vocab, g.embedding), g.dense_type)
    yield _vector("output_norm.weight", g.embedding, Fill.ONES)
    yield _matrix("output.weight", (g.vocab, g.embedding), g.output_type)
    for layer in range(g.layers):
        prefix = f"blk.{layer}."
        yield _vector(prefix + "attn_norm.weight", g.embedding, Fill.ONES)
        yield from _latent_attention(g, prefix) if g.arch == "deepseek2" else _attention(g, prefix)
        after_attention = "post_attention_norm" if g.arch in ("gpt-oss", "glm4moe") else "ffn_norm"
        yield _vector(f"{prefix}{after_attention}.weight", g.embedding, Fill.ONES)
        yield from _dense(g, prefix) if layer < g.dense_layers else _moe(g, prefix)


def _attention(g: Geometry, prefix: str) -> Iterator[TensorSpec]:
    wide, narrow = g.heads * g.head_dim, g.kv_heads * g.head_dim
    biased = g.arch == "gpt-oss"
    for name, rows in (("attn_q", wide), ("attn_k", narrow), ("attn_v", narrow)):
        yield _matrix(f"{prefix}{name}.weight", (rows, g.embedding), g.dense_type)
        if biased:
            yield _vector(f"{prefix}{name}.bias", rows, Fill.ZEROS)
    yield _matrix(prefix + "attn_output.weight", (g.embedding, wide), g.dense_type)
    if biased:
        yield _vector(prefix + "attn_output.bias", g.embedding, Fill.ZEROS)
        yield _vector(prefix + "attn_sinks.weight", g.heads, Fill.ZEROS)
    if g.arch in ("qwen3moe", "glm4moe"):
        yield _vector(prefix + "attn_q_norm.weight", g.head_dim, Fill.ONES)
        yield _vector(prefix + "attn_k_norm.weight", g.head_dim, Fill.ONES)
    elif g.arch in ("olmoe", "minimax-m2"):
        yield _vector(prefix + "attn_q_norm.weight", wide, Fill.ONES)
        yield _vector(prefix + "attn_k_norm.weight", narrow, Fill.ONES)


def _latent_attention(g: Geometry, prefix: str) -> Iterator[TensorSpec]:
    query = g.heads * (g.nope_dim + g.rope_dim)
    if g.q_lora:
        yield _matrix(prefix + "attn_q_a.weight", (g.q_lora, g.embedding), g.dense_type)
        yield _vector(prefix + "attn_q_a_norm.weight", g.q_lora, Fill.ONES)
        yield _matrix(prefix + "attn_q_b.weight", (query, g.q_lora), g.dense_type)
    else:
        yield _matrix(prefix + "attn_q.weight", (query, g.embedding), g.dense_type)
    yield _matrix(prefix + "attn_kv_a_mqa.weight", (g.kv_lora + g.rope_dim, g.embedding), g.dense_type)
    yield _vector(prefix + "attn_kv_a_norm.weight", g.kv_lora, Fill.ONES)
    yield _matrix(prefix + "attn_k_b.weight", (g.heads, g.kv_lora, g.nope_dim), g.dense_type)
    yield _matrix(prefix + "attn_v_b.weight", (g.heads, g.value_dim, g.kv_lora), g.dense_type)
    yield _matrix(prefix + "attn_output.weight", (g.embedding, g.heads * g.value_dim), g.dense_type)


def _dense(g: Geometry, prefix: str) -> Iterator[TensorSpec]:
    yield _matrix(prefix + "ffn_gate.weight", (g.dense_ff, g.embedding), g.dense_type)
    yield _matrix(prefix + "ffn_down.weight", (g.embedding, g.dense_ff), g.dense_type)
    yield _matrix(prefix + "ffn_up.weight", (g.dense_ff, g.embedding), g.dense_type)


def _moe(g: Geometry, prefix: str) -> Iterator[TensorSpec]:
    n, width, inner = g.experts, g.embedding, g.expert_ff
    yield _matrix(prefix + "ffn_gate_inp.weight", (n, width), "F32")
    if g.arch == "gpt-oss":
        yield _vector(prefix + "ffn_gate_inp.bias", n, Fill.ZEROS)
    if g.arch in ("glm4moe", "minimax-m2") or (g.arch == "deepseek2" and g.q_lora):
        yield _vector(prefix + "exp_probs_b.bias", n, Fill.ZEROS)
    for name, shape in (("gate", (n, inner, width)), ("up", (n, inner, width)), ("down", (n, width, inner))):
        yield _matrix(f"{prefix}ffn_{name}_exps.weight", shape, g.expert_type)
        if g.arch == "gpt-oss":
            yield TensorSpec(f"{prefix}ffn_{name}_exps.bias", shape[:2], "F32", Fill.ZEROS)
    if g.shared_experts:
        shared = inner * g.shared_experts
        yield _matrix(prefix + "ffn_gate_shexp.weight", (shared, width), g.dense_type)
        yield _matrix(prefix + "ffn_down_shexp.weight", (width, shared), g.dense_type)
        yield _matrix(prefix + "ffn_up_shexp.weight", (shared, width), g.dense_type)


def _vector(name: str, length: int, fill: Fill) -> TensorSpec:
    return TensorSpec(name, (length,), "F32", fill)


def _matrix(name: str, shape: tuple[int, ...], type_name: str) -> TensorSpec:
    wanted = type_name.upper()
    if wanted not in TYPE_IDS:
        raise UsageError(f"no tensor type {type_name}", hint="Q4_0, Q4_K, Q8_0, MXFP4 ...")
    if shape[-1] % GGML_TYPES[TYPE_IDS[wanted]].block:
        wanted = _FALLBACK.get(wanted, wanted)
    if shape[-1] % GGML_TYPES[TYPE_IDS[wanted]].block:
        raise UsageError(f"{name}: rows of {shape[-1]} do not divide into blocks of {wanted}")
    return TensorSpec(name, shape, wanted)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a geometry's tensors."""

    total_nbytes: int
    expert_nbytes: int
    one_expert_nbytes: int
    token_expert_nbytes: int


def sizes(g: Geometry) -> Sizes:
    """What the model takes on disk, and what a decoded token reads of its experts."""
    specs = list(tensors(g))
    experts = sum(s.nbytes for s in specs if s.is_expert and len(s.shape) == 3)
    one = experts // (g.experts * len(g.moe_layers))
    return Sizes(sum(s.nbytes for s in specs), experts, one, one * g.experts_used * len(g.moe_layers))
