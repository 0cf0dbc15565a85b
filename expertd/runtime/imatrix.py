"""Seeds a profile from an importance matrix of llama.cpp, before a single token was run.

The matrix was made by running a text through the model, so that it knows which experts the text used.
1. The GGUF form (general.type = imatrix) has `NAME.counts` for each stacked tensor: how many tokens each expert saw,
   which is what a profile counts. One count for a whole tensor means that it was converted from the older form.
2. The older form (imatrix.dat: i32 entries; each an i32 length and a name, i32 calls, i32 values and these as f32) has
   squared activations, divided by their number by most writers. Then only experts that were never used stand out: all
   their values equal the calls, or 0. An expert's sum is taken for its count: it is proportional to it where nothing
   was divided, and near even where it was. `exact` is False. Files of before the stacking name single experts,
   `blk.3.ffn_gate.17.weight`.

Of a layer's tensors the gate (else gate_up, up, down) is read: what it is given is what the router sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from expertd.errors import ModelFormatError, StateError
from expertd.model.gguf import GgufModel, read_model
from expertd.model.names import single_expert, stacked_expert
from expertd.runtime.profile import HALF_LIFE_TOKENS, Profile, Shape

_ORDER = {"gate": 0, "gate_up": 1, "up": 2, "down": 3}
_COUNTS, _SUMS = ".counts", ".in_sum2"
_F32 = 0
_MAX_ENTRIES, _MAX_NAME, _MAX_VALUES = 1 << 20, 1 << 12, 1 << 28
_MAGIC = b"GGUF"
_EFFECTIVE_TOKENS = HALF_LIFE_TOKENS / math.log(2)
"""What a profile that has run for long remembers. A seed of counts weighs no more, one of sums an eighth of it, or
traffic would not be heard beside it."""


@dataclass(frozen=True, slots=True)
class Seed:
    """`rows[layer]` are counts by expert; `exact` tells whether they are counts or only sums."""

    rows: dict[int, list[float]]
    exact: bool


def is_imatrix(path: Path) -> bool:
    """Whether a file looks like either form, by its first bytes. StateError where it cannot be read."""
    head = _head(path)
    if head[:4] == _MAGIC:
        return True
    if len(head) < 8:
        return False
    entries, length = struct.unpack("<ii", head)
    return bool(0 < entries < _MAX_ENTRIES and 0 < length < _MAX_NAME)


def read(path: Path, n_experts: int) -> Seed:
    """The matrix of a model with `n_experts` in a layer. StateError, or ModelFormatError for a damaged GGUF, that
    names the file."""
    seed = _read_gguf(path, n_experts) if _head(path)[:4] == _MAGIC else _read_dat(path, n_experts)
    if not any(any(row) for row in seed.rows.values()):
        raise StateError(f"{path}: it knows no experts", hint="was it made from a Mixture-of-Experts model?")
    return seed


def seed_profile(name: str, shape: Shape, seed: Seed, source: str) -> Profile:
    """A profile of the seed's counts. StateError when the matrix does not fit the model."""
    counts = [0.0] * (shape.n_layers * shape.n_experts)
    most = max(sum(row) for row in seed.rows.values())
    whole = _EFFECTIVE_TOKENS * shape.n_used
    for layer, row in seed.rows.items():
        total = sum(row)
        if layer >= shape.n_layers or len(row) > shape.n_experts:
            raise StateError(
                f"{source}: layer {layer} has {len(row)} experts; the model has {shape.n_layers} layers of "
                f"{shape.n_experts}",
                hint="it was made from another model",
            )
        scale = min(1.0, whole / most) if seed.exact else whole / 8 / (total or 1.0)
        first = layer * shape.n_experts
        counts[first : first + len(row)] = [c * scale for c in row]
    tokens = round(most / shape.n_used) if seed.exact else 0
    return Profile(name, shape, counts, tokens=tokens, sources=(f"imatrix {Path(source).name}",))


class _Layers:
    """The best tensor of each layer so far, and the single experts of old files."""

    def __init__(self) -> None:
        self._rank: dict[int, int] = {}
        self._rows: dict[int, list[float]] = {}
        self._single: dict[int, dict[int, float]] = {}

    def wants(self, name: str) -> bool:
        if (stacked := stacked_expert(name)) is not None:
            return _ORDER[stacked[1]] < self._rank.get(stacked[0], len(_ORDER))
        one = single_expert(name)
        return one is not None and one[2] == "gate"

    def add(self, name: str, row: list[float]) -> None:
        if (stacked := stacked_expert(name)) is not None:
            self._rank[stacked[0]], self._rows[stacked[0]] = _ORDER[stacked[1]], row
        elif (one := single_expert(name)) is not None:
            self._single.setdefault(one[0], {})[one[1]] = sum(row)

    def rows(self) -> dict[int, list[float]]:
        if self._rows:
            return self._rows
        return {layer: [found.get(i, 0.0) for i in range(max(found) + 1)] for layer, found in self._single.items()}


def _read_gguf(path: Path, n_experts: int) -> Seed:
    model = read_model(path)
    kind = model.kv.get("general.type")
    if kind != "imatrix":
        raise StateError(
            f"{path}: is a GGUF, but no importance matrix (general.type is {kind!r})", hint="llama-imatrix makes one"
        )
    layers, exact = _Layers(), True
    for tensor in model.tensors:
        name = tensor.name.removesuffix(_COUNTS)
        if name == tensor.name or not layers.wants(name):
            continue
        row = _values(model, tensor.name).tolist()
        if len(row) == 1 and stacked_expert(name) and n_experts > 1:
            exact = False
            row = _sums(_values(model, name + _SUMS), n_experts, row[0], path)
        layers.add(name, row)
    return Seed(layers.rows(), exact)


def _values(model: GgufModel, name: str) -> Any:
    tensor, path = model.by_name.get(name), model.files[0]
    if tensor is None or tensor.type_id != _F32:
        raise ModelFormatError(f"{path}: {name[:80]} is missing or not of type F32", hint="is it damaged?")
    with open(model.files[tensor.file], "rb") as f:
        f.seek(tensor.offset)
        return _floats(f.read(tensor.nbytes), path)


def _read_dat(path: Path, n_experts: int) -> Seed:
    layers = _Layers()
    try:
        with path.open("rb") as f:
            for name, calls, nvalues in _entries(f, path):
                if not layers.wants(name):
                    f.seek(4 * nvalues, 1)
                    continue
                values = _floats(_exactly(f, 4 * nvalues, path), path)
                n = n_experts if stacked_expert(name) else 1
                layers.add(name, _sums(values, n, float(calls), path))
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    return Seed(layers.rows(), exact=False)


def _entries(f: BinaryIO, path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, calls, number of values); the caller reads or skips the values before the next."""
    (entries,) = struct.unpack("<i", _exactly(f, 4, path))
    for _ in range(_checked(entries, _MAX_ENTRIES, path)):
        (length,) = struct.unpack("<i", _exactly(f, 4, path))
        name = _exactly(f, _checked(length, _MAX_NAME, path), path).decode("utf-8", "replace")
        calls, nvalues = struct.unpack("<ii", _exactly(f, 8, path))
        yield name, calls, _checked(nvalues, _MAX_VALUES, path)


def _checked(n: int, most: int, path: Path) -> int:
    if not 0 < n < most:
        raise StateError(f"{path}: is no importance matrix, or damaged", hint="both forms of llama-imatrix can be read")
    return n


def _exactly(f: BinaryIO, n: int, path: Path) -> bytes:
    data = f.read(n)
    if len(data) < n:
        raise StateError(f"{path}: is no importance matrix, or cut short", hint="copy it again")
    return data


def _sums(values: Any, n_experts: int, calls: float, path: Path) -> list[float]:
    """The sum of each expert's values; 0 for one that was never used."""
    if len(values) % n_experts:
        raise StateError(
            f"{path}: {len(values)} values are not {n_experts} experts'", hint="it was made from another model"
        )
    rows = values.reshape(n_experts, -1)
    sums = rows.sum(axis=1, dtype="f8")
    sums[(rows == calls).all(axis=1)] = 0.0
    found: list[float] = sums.tolist()
    return found


def _floats(data: bytes, path: Path) -> Any:
    """Little-endian f32 as a numpy array, none of them below 0, infinite or no number."""
    import numpy as np

    values = np.frombuffer(data, "<f4")
    if not bool(((values >= 0) & np.isfinite(values)).all()):
        raise StateError(f"{path}: holds values that are no counts", hint="is it damaged?")
    return values


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as f:
            return f.read(8)
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
