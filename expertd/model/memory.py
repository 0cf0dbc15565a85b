"""Bytes that running a model takes beside its weights: the KV cache of a context, by the form of each layer.

As llama.cpp allocates it: the context is padded to 256 tokens; a window's cache holds window + one micro-batch, padded
to 256; recurrent states are F32 and one sequence each. Not here: which layer has which form (`attention`), the compute
buffer (`compute`).
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.errors import UsageError
from expertd.model.attention import Attention, Form, LayerMemory
from expertd.model.ggml_types import GGML_TYPES

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
_PAD_TOKENS = 256
_F32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of the caches: layers that keep all tokens, windows, recurrent states; and the sum of each layer."""

    full: int
    window: int
    state: int
    layers: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.full + self.window + self.state


def padded(n: int) -> int:
    """Tokens as the cache holds them: a multiple of 256."""
    return -(-n // _PAD_TOKENS) * _PAD_TOKENS


def window_cells(attention: Attention, n_ctx: int, n_ubatch: int) -> int:
    """Tokens that a window's cache holds."""
    return padded(min(padded(n_ctx), attention.window + n_ubatch))


def kv_nbytes(attention: Attention, n_ctx: int, n_ubatch: int, kv_type: str) -> KvBytes:
    """The KV cache of one sequence of `n_ctx` tokens.

    Raises UsageError for a type that llama.cpp's cache does not take, or whose blocks do not divide a layer's width.
    """
    if kv_type not in KV_TYPES:
        raise UsageError(f"{kv_type!r} is no KV cache type", hint=f"one of {', '.join(KV_TYPES)}")
    cells, windowed = padded(n_ctx), window_cells(attention, n_ctx, n_ubatch)
    full = window = state = 0
    layers = []
    for m in attention.layers:
        kept = _row(m, kv_type) * (windowed if m.form is Form.WINDOW else cells)
        kept += row_nbytes(m.compressed, kv_type) * padded(-(-cells // m.ratio))
        if m.form is Form.WINDOW:
            window += kept
        else:
            full += kept
        state += m.state * _F32_NBYTES
        layers.append(kept + m.state * _F32_NBYTES)
    return KvBytes(full, window, state, tuple(layers))


def _row(m: LayerMemory, kv_type: str) -> int:
    return sum(row_nbytes(width, kv_type) for width in (m.k, m.v, m.index))


def row_nbytes(width: int, kv_type: str) -> int:
    """Bytes of `width` elements as a row of the cache. Raises UsageError where they are no whole blocks."""
    t = GGML_TYPES[KV_TYPES[kv_type]]
    if width % t.block:
        raise UsageError(
            f"a KV cache of {kv_type} has blocks of {t.block}, but a layer keeps {width} elements a token",
            hint="use --kv f16",
        )
    return width // t.block * t.block_nbytes
