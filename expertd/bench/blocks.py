"""Random blocks of GGML's tensor types: plausible weights as fast as memory copies them.

One pool of blocks is drawn a type and scale, and tensors are cut from it at random places: what a benchmark reads
must be honest bytes, not fresh ones. Scales keep activations near 1, so that the arms' outputs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd.bench.tensors import Fill, TensorSpec
from expertd.errors import UsageError

Blocks = npt.NDArray[np.uint8]
_POOL_NBYTES = 8 << 20


def _half(blocks: Blocks, at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _legacy(deviation_of_codes: float) -> Callable[[Blocks, float], None]:
    """Blocks that start with one scale and hold codes around zero."""

    def fill(blocks: Blocks, deviation: float) -> None:
        _half(blocks, 0, deviation / deviation_of_codes)

    return fill


def _q4_k(blocks: Blocks, deviation: float) -> None:
    # value = d * scale * q - dmin * min, with 6-bit scales and mins: 7.5 d for dmin puts the mean at zero.
    d = deviation / 256.7
    _half(blocks, 0, d)
    _half(blocks, 2, 7.5 * d)


def _q6_k(blocks: Blocks, deviation: float) -> None:
    _half(blocks, 208, deviation / 1367)


def _mxfp4(blocks: Blocks, deviation: float) -> None:
    # One exponent of two for 32 codes of deviation 5.85; ggml halves it (its table holds doubled values).
    blocks[:, 0] = round(128 + math.log2(deviation / 5.85))


_SCALES: dict[str, Callable[[Blocks, float], None]] = {
    "Q4_0": _legacy(4.61),
    "Q5_0": _legacy(9.23),
    "Q8_0": _legacy(73.9),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16}


def check_type(name: str) -> None:
    """Raises UsageError when no random blocks of that type can be made."""
    if name not in _SCALES and name not in _FLOATS:
        raise UsageError(f"cannot make random {name} blocks", hint=f"one of {', '.join((*_FLOATS, *_SCALES))}")


class RandomTensors:
    """Gives tensors as a stream of pieces, the same for the same seed. One owner, one thread."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._raw = self._rng.bytes(_POOL_NBYTES)
        self._pool = cache(self._make_pool)

    def pieces(self, spec: TensorSpec) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces of at most 8 MiB."""
        if spec.fill is not Fill.RANDOM:
            value = 1.0 if spec.fill is Fill.ONES else 0.0
            yield np.full(spec.n_elements, value, np.float32).view(np.uint8).data
            return
        pool = self._pool(spec.type, spec.deviation)
        size = spec.ggml_type.block_nbytes
        start = int(self._rng.integers(0, len(pool) // size)) * size
        left = spec.nbytes
        while left:
            piece = pool[start : start + left]
            yield piece
            left -= len(piece)
            start = 0

    def _make_pool(self, type_name: str, deviation: float) -> memoryview:
        check_type(type_name)
        number = _FLOATS.get(type_name)
        if number is not None:
            values = self._rng.standard_normal(_POOL_NBYTES // 8, np.float32) * np.float32(deviation)
            return values.astype(number).view(np.uint8).data
        size = TensorSpec("", (256,), type_name).ggml_type.block_nbytes
        count = _POOL_NBYTES // size
        blocks = np.frombuffer(self._raw, np.uint8, count * size).reshape(count, size).copy()
        _SCALES[type_name](blocks, deviation)
        return blocks.reshape(-1).data
