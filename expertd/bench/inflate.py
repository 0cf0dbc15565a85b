"""The built-in model with larger experts: the same function, words and routing, and as many bytes as are wanted.

Each expert's feed-forward width is padded with zeros: new rows of gate and up give silu(0) * 0 = 0, and the new
columns of down multiply that by zero. The original blocks are copied bit for bit, so what a token computes is what it
computed before. Every byte is written: a file with holes would be read from nowhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from expertd.bench.modelfile import RECIPE_KEY, ModelFile, Progress, made_by, silent
from expertd.errors import UsageError
from expertd.model.fingerprint import fingerprint
from expertd.model.ggml_types import GGML_TYPES, GgmlType
from expertd.model.gguf import GgufModel, read_model
from expertd.model.names import stacked_expert

_RECIPE_VERSION = 1
STEP = 256
"""Widths are multiples of this, so that every block length divides them."""


def built_in() -> Path:
    """The tiny MoE that is part of the package."""
    return Path(str(resources.files("expertd") / "data" / "tiny-moe-q4_0.gguf"))


@dataclass(frozen=True, slots=True)
class Inflation:
    """`source` with experts `ff` wide instead of `source_ff`; the file will have `nbytes`."""

    source: Path
    source_ff: int
    ff: int
    nbytes: int

    def file_name(self) -> str:
        return f"{self.source.stem}-ff{self.ff}-{self.nbytes / 1e9:.1f}GB.gguf"


def plan(nbytes: int, source: Path | None = None) -> Inflation:
    """The widest inflation that stays within `nbytes`. Raises UsageError when the size is below the smallest one, and
    ModelError when the source cannot be read."""
    path = source or built_in()
    model = read_model(path)
    ff = model.integer("expert_feed_forward_length")
    if not ff or ff % 32:
        raise UsageError(f"{path} does not say how wide its experts are", hint="inflate the built-in model")
    fixed, per_unit = _sizes(model, ff)
    wide = int((nbytes - fixed) // per_unit) // STEP * STEP
    narrowest = math.ceil(ff / STEP) * STEP
    if wide < narrowest:
        raise UsageError(
            f"{path.name} cannot be as small as {nbytes} bytes with experts {narrowest} wide",
            hint=f"ask for {round(fixed + narrowest * per_unit)} bytes or more",
        )
    return Inflation(path, ff, wide, round(fixed + wide * per_unit))


def _sizes(model: GgufModel, ff: int) -> tuple[int, float]:
    """Bytes that do not depend on the width, and those that every unit of width costs."""
    experts = sum(t.nbytes for t in model.tensors if stacked_expert(t.name) is not None)
    return model.nbytes - experts, experts / ff


def write(job: Inflation, path: Path, *, progress: Progress = silent) -> bool:
    """Make the file, one expert at a time; False when it is there already. Raises BenchError when the disk is full."""
    wanted = json.dumps(
        {"inflate": _RECIPE_VERSION, "ff": job.ff, "source": fingerprint(read_model(job.source))}, sort_keys=True
    )
    if made_by(path, wanted):
        return False
    from gguf import GGUFReader

    reader = GGUFReader(job.source)
    arch = str(reader.fields["general.architecture"].contents())
    with ModelFile(path, arch, job.nbytes, progress) as out:
        _copy_keys(reader, out.writer, f"{arch}.expert_feed_forward_length", job.ff)
        out.writer.add_string(RECIPE_KEY, wanted)
        for tensor in reader.tensors:
            _add_info(out.writer, tensor, job)
        out.begin()
        for tensor in reader.tensors:
            for piece in _pieces(tensor, job):
                out.write(piece)
            out.pad()
    return True


def _copy_keys(reader: Any, writer: Any, width_key: str, ff: int) -> None:
    from gguf import GGUFValueType

    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == width_key:
            value = ff
        elif field.name == "general.name":
            value = f"{value} (experts {ff} wide)"
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if is_array else None)


def _shape(tensor: Any, job: Inflation) -> tuple[int, ...]:
    """The shape that the tensor gets, row last."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    role = stacked_expert(tensor.name)
    if role is None:
        return shape
    return (*shape[:-1], job.ff) if role[1] == "down" else (shape[0], job.ff, shape[2])


def _type(tensor: Any) -> GgmlType:
    return GGML_TYPES[int(tensor.tensor_type)]


def _row_nbytes(n: int, kind: GgmlType) -> int:
    return n // kind.block * kind.block_nbytes


def _add_info(writer: Any, tensor: Any, job: Inflation) -> None:
    import numpy as np

    shape, kind = _shape(tensor, job), _type(tensor)
    nbytes = math.prod(shape[:-1]) * _row_nbytes(shape[-1], kind)
    if kind.name in ("F32", "F16"):
        number = np.dtype(np.float32 if kind.name == "F32" else np.float16)
        writer.add_tensor_info(tensor.name, list(shape), number, nbytes)
        return
    rows = [*shape[:-1], _row_nbytes(shape[-1], kind)]
    writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), nbytes, raw_dtype=tensor.tensor_type)


def _pieces(tensor: Any, job: Inflation) -> Iterator[memoryview]:
    """The tensor's bytes: as they are, or expert by expert with zeros after the rows or at the end of each row."""
    import numpy as np

    data = np.ascontiguousarray(tensor.data)
    role = stacked_expert(tensor.name)
    if role is None:
        yield data.reshape(-1).view(np.uint8).data
        return
    n, rows, width = _shape(tensor, job)
    zeros = _zero_row(width, _type(tensor))
    for expert in data.view(np.uint8).reshape(n, data.shape[1], -1):
        whole = np.empty((rows, len(zeros)), np.uint8)
        whole[: expert.shape[0], : expert.shape[1]] = expert
        whole[: expert.shape[0], expert.shape[1] :] = zeros[expert.shape[1] :]
        whole[expert.shape[0] :] = zeros
        yield whole.reshape(-1).data


def _zero_row(n: int, kind: GgmlType) -> Any:
    """A row of `n` zeros as it is stored. Raises UsageError for types whose zero is not known here."""
    import numpy as np

    # Q4_0 stores codes of -8 to 7 as 0 to 15; with a scale of zero any would do, and these are what a quantizer writes.
    block = {"Q4_0": b"\0\0" + b"\x88" * 16, "Q8_0": bytes(34), "F16": bytes(2), "F32": bytes(4)}.get(kind.name)
    if block is None:
        raise UsageError(f"cannot inflate experts of type {kind.name}", hint="inflate the built-in model")
    return np.frombuffer(block * (n // kind.block), np.uint8)
