"""Writes a model of random weights with a given geometry: a machine can be measured before a model is downloaded.

The file loads and runs in llama.cpp as the real model would: same tensors, same sizes, same work. Its words are noise
and so is its routing, unless a recorded trace is forced upon it (`forcing`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertd.bench.blocks import RandomTensors, check_type
from expertd.bench.geometry import Geometry
from expertd.bench.modelfile import RECIPE_KEY, ModelFile, Progress, made_by, silent
from expertd.bench.tensors import TYPE_IDS, TensorSpec, sizes, tensors

_RECIPE_VERSION = 1
_HEADER_NBYTES_A_TOKEN = 64


def recipe(g: Geometry, seed: int) -> str:
    """What decides every byte of the file, as one line."""
    return json.dumps({"synth": _RECIPE_VERSION, "seed": seed, **dataclasses.asdict(g)}, sort_keys=True)


def expected_nbytes(g: Geometry) -> int:
    """Size of the file, header included (rounded up by a few hundred KiB)."""
    return sizes(g).total_nbytes + g.vocab * _HEADER_NBYTES_A_TOKEN + (1 << 20)


def file_name(g: Geometry) -> str:
    """A name that tells files of different geometries apart at a glance: qwen3-30b-a3b-q4_0-17.3GB.gguf."""
    return f"{g.name}-{g.expert_type.lower()}-{sizes(g).total_nbytes / 1e9:.1f}GB.gguf"


def write(g: Geometry, path: Path, *, seed: int = 0, progress: Progress = silent) -> bool:
    """Make the file; False when it is there already. Raises UsageError for types that cannot be made, BenchError when
    the disk is full."""
    wanted = recipe(g, seed)
    if made_by(path, wanted):
        return False
    specs = list(tensors(g))
    for spec in specs:
        check_type(spec.type)
    with ModelFile(path, g.arch, sum(s.nbytes for s in specs), progress) as out:
        _add_keys(out.writer, g)
        out.writer.add_string(RECIPE_KEY, wanted)
        for spec in specs:
            add_info(out.writer, spec)
        out.begin()
        random = RandomTensors(seed)
        for spec in specs:
            for piece in random.pieces(spec):
                out.write(piece)
            out.pad()
    return True


def add_info(writer: Any, spec: TensorSpec) -> None:
    """Tell gguf's writer of a tensor whose bytes come later."""
    import numpy as np
    from gguf import GGMLQuantizationType

    # For quantized data the writer wants the shape of the bytes, and works out the elements itself.
    shape = [*spec.shape[:-1], spec.row_nbytes]
    kind = GGMLQuantizationType(TYPE_IDS[spec.type])
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        number = np.float32 if spec.type == "F32" else np.float16
        writer.add_tensor_info(spec.name, list(spec.shape), np.dtype(number), spec.nbytes)
    else:
        writer.add_tensor_info(spec.name, shape, np.dtype(np.uint8), spec.nbytes, raw_dtype=kind)


def _add_keys(w: Any, g: Geometry) -> None:
    a = f"{g.arch}."
    w.add_name(f"{g.name} (random weights)")
    w.add_quantization_version(2)
    latent = g.arch == "deepseek2"
    numbers: dict[str, int] = {
        "block_count": g.layers,
        "context_length": g.context,
        "embedding_length": g.embedding,
        "feed_forward_length": g.dense_ff or g.expert_ff,
        "attention.head_count": g.heads,
        "attention.head_count_kv": g.kv_heads,
        "attention.key_length": g.kv_lora + g.rope_dim if latent else g.head_dim,
        "attention.value_length": g.kv_lora if latent else g.head_dim,
        "rope.dimension_count": g.rope_dim or g.head_dim,
        "expert_count": g.experts,
        "expert_used_count": g.experts_used,
        "expert_feed_forward_length": g.expert_ff,
        "vocab_size": g.vocab,
    }
    if g.dense_layers:
        numbers["leading_dense_block_count"] = g.dense_layers
    if g.arch in ("deepseek2", "glm4moe"):
        numbers["expert_shared_count"] = g.shared_experts
    if latent:
        numbers["attention.kv_lora_rank"] = g.kv_lora
        numbers["attention.key_length_mla"] = g.nope_dim + g.rope_dim
        numbers["attention.value_length_mla"] = g.value_dim
        if g.q_lora:
            numbers["attention.q_lora_rank"] = g.q_lora
    for key, number in numbers.items():
        w.add_uint32(a + key, number)
    w.add_float32(a + "attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32(a + "rope.freq_base", 10000.0)
    for key, value in g.keys.items():
        add = w.add_bool if isinstance(value, bool) else w.add_uint32 if isinstance(value, int) else w.add_float32
        add(a + key, value)
    _add_vocabulary(w, g.vocab)


def _add_vocabulary(w: Any, n: int) -> None:
    """A byte-level BPE of the wanted size: the 256 bytes, some English pairs, fillers, three control tokens."""
    letters = list(_byte_letters())
    merges = [(a, b) for a in "etaoinshrdlu" for b in "etaoinshrdlucmfwyp"]
    tokens = letters + [a + b for a, b in merges]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fillers = [f"<|filler_{i}|>" for i in range(n - len(tokens) - len(control))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens + fillers + control)
    w.add_token_types([1] * (len(tokens) + len(fillers)) + [3] * len(control))
    w.add_token_merges([f"{a} {b}" for a, b in merges])
    w.add_eos_token_id(n - 3)
    w.add_bos_token_id(n - 3)
    w.add_add_bos_token(False)


def _byte_letters() -> Iterator[str]:
    """The letter that stands for each byte in byte-level BPE: printable ones for themselves, others from 256 on."""
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(shifted)
            shifted += 1
