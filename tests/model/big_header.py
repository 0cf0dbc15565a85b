"""A 60 GB-class header in three sparse shards: 150k vocabulary, 300k merges, 94 layers x 128 experts.

    python tests/model/big_header.py DIRECTORY

writes it (some 20 MB of real bytes), to be measured with `/usr/bin/time -v expertd inspect`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from model_gguf_bytes import (
    ARRAY,
    F32,
    I32,
    STRING,
    TYPE_F32,
    TYPE_Q4_K,
    U16,
    Tensor,
    attention_layer,
    key,
    keys,
    moe_layer,
    outer,
    write,
)  # fmt: skip

N_VOCAB, N_LAYERS, N_EXPERTS = 151_936, 94, 128


def big_keys() -> list[bytes]:
    """The vocabulary before the architecture's own keys."""
    p = "qwen3moe."
    return [
        *keys({"general.architecture": "qwen3moe", "general.name": "Big"}),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"token{i:06d}" for i in range(N_VOCAB)])),
        key("tokenizer.ggml.token_type", ARRAY, (I32, [1] * N_VOCAB)),
        key("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * N_VOCAB)),
        key("tokenizer.ggml.merges", ARRAY, (STRING, [f"left{i:06d} right{i % 999}" for i in range(300_000)])),
        *keys({
            p + "block_count": N_LAYERS, p + "context_length": 40960, p + "embedding_length": 2048,
            p + "attention.head_count": 32, p + "attention.head_count_kv": 4, p + "attention.key_length": 128,
            p + "attention.value_length": 128, p + "expert_count": N_EXPERTS, p + "expert_used_count": 8,
            p + "expert_feed_forward_length": 1408,
        }),
    ]  # fmt: skip


def write_big(directory: Path) -> list[Path]:
    """Three shards of 60 GB together, tensors shared out by layer."""
    tensors = outer(2048, N_VOCAB, TYPE_Q4_K)
    for i in range(N_LAYERS):
        tensors += [*attention_layer(i, 2048, 512, TYPE_Q4_K), Tensor(f"blk.{i}.ffn_norm.weight", (2048,), TYPE_F32)]
        tensors += [
            t if "down_exps" not in t.name else Tensor(t.name, (2048, 1408, N_EXPERTS), TYPE_Q4_K)
            for t in moe_layer(i, 2048, 1408, N_EXPERTS, TYPE_Q4_K)
        ]
    third = -(-len(tensors) // 3)
    paths = []
    for i in range(3):
        split = [key("split.no", U16, i), key("split.count", U16, 3), key("split.tensors.count", I32, len(tensors))]
        path = directory / f"big-{i + 1:05d}-of-00003.gguf"
        paths.append(write(path, (big_keys() if i == 0 else []) + split, tensors[i * third : (i + 1) * third]))
    return paths


if __name__ == "__main__":
    for path in write_big(Path(sys.argv[1])):
        print(path, path.stat().st_size)
