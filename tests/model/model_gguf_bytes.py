"""Writes GGUF headers byte by byte, so that each byte can be wrong on purpose. Tensor data is a hole in the file."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_Q4_K = 0, 1, 2, 8, 12
_BLOCKS = {TYPE_F32: (1, 4), TYPE_F16: (1, 2), TYPE_Q4_0: (32, 18), TYPE_Q8_0: (32, 34), TYPE_Q4_K: (256, 144)}


@dataclass(frozen=True)
class Tensor:
    """`nbytes` stands for types without a known size, `offset` overrides the place in the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int = TYPE_F32
    nbytes: int | None = None
    offset: int | None = None

    @property
    def size(self) -> int:
        if self.nbytes is not None:
            return self.nbytes
        n = 1
        for d in self.shape:
            n *= d
        block, block_nbytes = _BLOCKS[self.type_id]
        return n // block * block_nbytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(type_id: int, item: object) -> bytes:
    if type_id == STRING:
        assert isinstance(item, str | bytes)
        return text(item)
    if type_id == ARRAY:
        assert isinstance(item, tuple)
        kind, items = item
        return struct.pack("<IQ", kind, len(items)) + b"".join(value(kind, i) for i in items)
    return struct.pack("<" + _CODES[type_id], item)


def key(name: str, type_id: int, item: object) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value(type_id, item)


def typed(item: object) -> tuple[int, object]:
    """A value's GGUF type, guessed as a converter would."""
    if isinstance(item, bool):
        return BOOL, item
    if isinstance(item, int):
        return U32, item
    if isinstance(item, float):
        return F32, item
    if isinstance(item, str):
        return STRING, item
    assert isinstance(item, list)
    kind = typed(item[0])[0] if item else U32
    return ARRAY, (I32 if kind == U32 else kind, item)


def keys(entries: dict[str, object]) -> list[bytes]:
    return [key(name, *typed(item)) for name, item in entries.items()]


def header(
    entries: dict[str, object] | Sequence[bytes],
    tensors: Sequence[Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> tuple[bytes, int]:
    """(header with its padding, bytes of data that belong behind it)."""
    raw = keys(entries) if isinstance(entries, dict) else list(entries)
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors,
                                len(raw) if n_keys is None else n_keys), *raw]  # fmt: skip
    at = end = 0
    for t in tensors:
        offset = at if t.offset is None else t.offset
        out.append(text(t.name) + struct.pack("<I", len(t.shape)) + struct.pack(f"<{len(t.shape)}Q", *t.shape))
        out.append(struct.pack("<IQ", t.type_id, offset))
        end = max(end, at + t.size)
        at = -(-(at + t.size) // alignment) * alignment
    head = b"".join(out)
    return head + b"\0" * (-len(head) % alignment), end


def write(path: Path, entries: dict[str, object] | Sequence[bytes], tensors: Sequence[Tensor], **more: int) -> Path:
    """A sparse file of the right length."""
    head, data = header(entries, tensors, **more)
    path.write_bytes(head)
    os.truncate(path, len(head) + data)
    return path


def write_shards(
    directory: Path, stem: str, entries: dict[str, object], shards: Sequence[Sequence[Tensor]], total: int | None = None
) -> list[Path]:
    """Split files as llama-gguf-split writes them: all keys in the first, numbers in each."""
    count = len(shards)
    n = sum(len(s) for s in shards) if total is None else total
    paths = []
    for i, tensors in enumerate(shards):
        split = [
            key("split.no", U16, i), key("split.count", U16, count), key("split.tensors.count", I32, n)
        ]  # fmt: skip
        own = (keys(entries) if i == 0 else []) + split
        paths.append(write(directory / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf", own, tensors))
    return paths


def moe_layer(layer: int, n_embd: int, ff: int, n: int, type_id: int = TYPE_Q4_0) -> list[Tensor]:
    """Router and stacked experts of one layer."""
    p = f"blk.{layer}.ffn_"
    return [
        Tensor(p + "gate_inp.weight", (n_embd, n)),
        Tensor(p + "gate_exps.weight", (n_embd, ff, n), type_id),
        Tensor(p + "up_exps.weight", (n_embd, ff, n), type_id),
        Tensor(p + "down_exps.weight", (ff, n_embd, n), type_id),
    ]


def attention_layer(layer: int, n_embd: int, kv: int, type_id: int = TYPE_Q4_0) -> list[Tensor]:
    p = f"blk.{layer}.attn_"
    return [
        Tensor(p + "norm.weight", (n_embd,)),
        Tensor(p + "q.weight", (n_embd, n_embd), type_id),
        Tensor(p + "k.weight", (n_embd, kv), type_id),
        Tensor(p + "v.weight", (n_embd, kv), type_id),
        Tensor(p + "output.weight", (n_embd, n_embd), type_id),
    ]


def outer(n_embd: int, n_vocab: int, type_id: int = TYPE_Q4_0) -> list[Tensor]:
    return [
        Tensor("token_embd.weight", (n_embd, n_vocab), type_id),
        Tensor("output_norm.weight", (n_embd,)),
        Tensor("output.weight", (n_embd, n_vocab), type_id),
    ]


def moe_keys(n_layers: int, n_embd: int = 256, used: int = 2, n: int = 8, **more: object) -> dict[str, object]:
    base: dict[str, object] = {
        "general.architecture": "qwen3moe",
        "general.name": "test",
        "qwen3moe.block_count": n_layers,
        "qwen3moe.context_length": 32768,
        "qwen3moe.embedding_length": n_embd,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.expert_count": n,
        "qwen3moe.expert_used_count": used,
    }
    return base | {k.replace("__", "."): v for k, v in more.items()}


def moe_tensors(n_layers: int, n_embd: int = 256, ff: int = 64, n: int = 8) -> list[Tensor]:
    found = outer(n_embd, 128)
    for i in range(n_layers):
        found += [*attention_layer(i, n_embd, 128), Tensor(f"blk.{i}.ffn_norm.weight", (n_embd,))]
        found += moe_layer(i, n_embd, ff, n)
    return found
