"""Small models with recurrent layers and random weights, which llama.cpp can run: the architectures of `tests/model`
with the built-in model's tokenizer, and a plain Mamba."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))


def mamba() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Recurrent in every layer."""
    from model_architectures import base, outer

    embd, inner, state, rank = 256, 512, 16, 16
    keys = base(4, embd, 0, 0, 0) | {
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": rank,
    }  # fmt: skip
    shapes = outer(embd)
    for i in range(4):
        p = f"blk.{i}."
        shapes |= {
            p + "attn_norm.weight": (embd,), p + "ssm_in.weight": (embd, 2 * inner),
            p + "ssm_conv1d.weight": (4, inner), p + "ssm_conv1d.bias": (inner,),
            p + "ssm_x.weight": (inner, rank + 2 * state), p + "ssm_dt.weight": (rank, inner),
            p + "ssm_dt.bias": (inner,), p + "ssm_a": (state, inner), p + "ssm_d": (inner,),
            p + "ssm_out.weight": (inner, embd),
        }  # fmt: skip
    return keys, shapes


def write_random(name: str, tokenizer: Path, path: Path) -> Path:
    """`tokenizer` is a model whose tokenizer is taken. Same name, same weights."""
    import gguf
    import model_architectures
    import numpy as np
    from model_hybrids import HYBRIDS

    fields = [f for n, f in gguf.GGUFReader(tokenizer).fields.items() if n.startswith("tokenizer.ggml.")]
    n_vocab = next(len(f.data) for f in fields if f.name == "tokenizer.ggml.tokens")
    arch, build = (HYBRIDS | {"mamba": ("mamba", mamba)})[name]
    with mock.patch.object(model_architectures, "N_VOCAB", n_vocab):
        keys, shapes = build()
    writer = gguf.GGUFWriter(path, arch)
    for f in fields:
        writer.add_key_value(f.name, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
    for key, value in keys.items():
        add = {list: writer.add_array, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{arch}.{key}", value)
    random = np.random.default_rng(7)
    for tensor, shape in shapes.items():
        values = _values(tensor, random.standard_normal(shape[::-1]).astype(np.float32), shape[0])
        writer.add_tensor(tensor, values if _single(tensor, shape) else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _single(tensor: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp wants it in single precision."""
    small = ".ssm_" in tensor and not any(n in tensor for n in ("ssm_in", "ssm_out", "ssm_x", "ssm_dt.weight"))
    small = small or "shortconv.conv." in tensor or tensor.endswith((".bias", ".scale", "gate_inp.weight"))
    return len(shape) == 1 or small


def _values(tensor: str, drawn: Any, n_inputs: int) -> Any:
    """Scaled so that a state decays and nothing grows without bounds."""
    if "norm" in tensor:
        return 1 + 0.1 * drawn
    if tensor.endswith("ssm_a"):
        return -abs(drawn) - 0.1
    return drawn * (0.1 if drawn.ndim == 1 else n_inputs**-0.5)
