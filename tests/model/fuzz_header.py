"""Mutates headers in memory and reads them: each must give an error of ours or a map, soon and in little memory.

    python tests/model/fuzz_header.py --count 1000000 --seed 1

prints what came out. The test suite runs the same code on some thousands (`test_header_fuzz`).
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import struct
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from model_gguf_bytes import (
    ARRAY,
    F32,
    I32,
    STRING,
    TYPE_Q4_0,
    U16,
    Tensor,
    attention_layer,
    header,
    key,
    keys,
    moe_keys,
    moe_layer,
    moe_tensors,
)  # fmt: skip

from expertd.errors import ExpertdError, ModelError
from expertd.model.expertmap import ExpertMap, build_map
from expertd.model.gguf import GgufModel
from expertd.model.header import read_header
from expertd.model.plan import Machine, Wish, make_plan
from expertd.model.report import inspect_report, layer_rows, tensor_rows

EDGES = [0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 256, 4095, 65535, *(1 << n for n in (16, 20, 30, 31, 32, 40, 60, 62, 63)),
         (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 32, (1 << 64) - 1]  # fmt: skip
PATH = Path("fuzzed.gguf")


class Sparse(io.BytesIO):
    """A header followed by a hole, as a file of `nbytes` bytes."""

    def __init__(self, head: bytes, nbytes: int) -> None:
        super().__init__(head)
        self.nbytes = nbytes

    def read(self, size: int | None = -1, /) -> bytes:
        at = self.tell()
        wanted = max(0, min(self.nbytes - at, self.nbytes if size is None or size < 0 else size))
        found = super().read(wanted)
        self.seek(at + wanted)
        return found + b"\0" * (wanted - len(found))


def seeds() -> list[tuple[bytes, int]]:
    """Sound headers to start from, with the bytes of data behind each."""
    tokens = [key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{i}" for i in range(40)])),
              key("tokenizer.ggml.scores", ARRAY, (F32, [0.5] * 40))]  # fmt: skip
    split = [key("split.no", U16, 0), key("split.count", U16, 1), key("split.tensors.count", I32, 8)]
    single = [Tensor(f"blk.0.ffn_up.{i}.weight", (32, 32), TYPE_Q4_0) for i in range(4)]
    window = {
        "general.architecture": "gpt-oss", "gpt-oss.block_count": 2, "gpt-oss.attention.sliding_window": 128,
        "gpt-oss.attention.head_count": 4, "gpt-oss.attention.head_count_kv": [2, 2], "gpt-oss.embedding_length": 64,
        "gpt-oss.expert_used_count": [1, 2], "gpt-oss.expert_count": 4, "gpt-oss.nextn_predict_layers": 1,
    }  # fmt: skip
    hybrid = {
        "general.architecture": "qwen3next", "qwen3next.block_count": 4, "qwen3next.full_attention_interval": 4,
        "qwen3next.attention.head_count": 4, "qwen3next.embedding_length": 64, "qwen3next.ssm.conv_kernel": 4,
        "qwen3next.ssm.inner_size": 64, "qwen3next.ssm.state_size": 16, "qwen3next.ssm.group_count": 2,
    }  # fmt: skip
    unknown = [Tensor("blk.0.ffn_up_exps.weight", (32, 8, 4), 153, nbytes=640), Tensor("mystery", (3,))]
    return [
        header([*keys(moe_keys(1)), *tokens], moe_tensors(1)),
        header([*keys(window), *split], moe_layer(0, 64, 32, 4) + moe_layer(1, 64, 32, 4)),
        header(keys(hybrid) + tokens, attention_layer(3, 64, 32) + unknown),
        header(moe_keys(1), single, version=2),
    ]


def mutate(head: bytes, random: random.Random) -> bytes:
    """One to four changes of the kinds that damage and malice make."""
    raw = bytearray(head)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        kind = random.randrange(8)
        at = random.randrange(len(raw)) if raw else 0
        if kind <= 1 and raw:
            raw[at] ^= 1 << random.randrange(8)
        elif kind == 2 and raw:
            raw[at] = random.randrange(256)
        elif kind == 3:
            raw[at : at + 8] = struct.pack("<Q", random.choice(EDGES))
        elif kind == 4:
            raw[at : at + 4] = struct.pack("<I", random.choice(EDGES) & 0xFFFFFFFF)
        elif kind == 5:
            del raw[at : at + random.choice((1, 4, 8, 40))]
        elif kind == 6:
            raw[at:at] = raw[at : at + random.choice((1, 8, 64))] or b"\0"
        else:
            del raw[at:]
    return bytes(raw)


def digest(head: bytes, nbytes: int, *, deep: bool) -> str:
    """Read and map; `deep` also plans and reports. Gives the kind of outcome; only our own errors are caught."""
    try:
        found = read_header(Sparse(head, nbytes), nbytes, PATH)
    except ModelError as error:
        return _named(error)
    model = GgufModel((PATH,), (nbytes,), (found.data_offset,), found.kv, found.tensors, found.warnings)
    experts = build_map(model)
    assert sum(experts.buckets.values()) == model.tensor_nbytes
    return _use(experts) if deep else "map"


def _named(error: ExpertdError) -> str:
    if "\n" in error.line():
        raise AssertionError(f"an error of several lines: {error.line()!r}")
    return type(error).__name__


def _use(experts: ExpertMap) -> str:
    """All that inspect and plan would do."""
    inspect_report(experts, "")
    layer_rows(experts)
    tensor_rows(experts)
    try:
        layout = experts.layout()
        assert sum(layout.expert_sizes) == layout.expert_nbytes
        make_plan(experts, Machine(ram_nbytes=1 << 34, vram_nbytes=1 << 33, n_gpus=1), Wish())
    except ExpertdError as error:
        return f"map, {_named(error)}"
    return "map and plan"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deep-every", type=int, default=50, help="plan and report one of so many that map")
    options = parser.parse_args()
    numbers, bases, outcomes = random.Random(options.seed), seeds(), Counter[str]()
    base_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, slowest = time.perf_counter(), 0.0
    for i in range(options.count):
        head, data = numbers.choice(bases)
        mutated = mutate(head, numbers)
        began = time.process_time()
        try:
            outcomes[digest(mutated, len(head) + data, deep=i % options.deep_every == 0)] += 1
        except BaseException:
            print(f"number {i}: {mutated.hex()}", file=sys.stderr)
            raise
        slowest = max(slowest, time.process_time() - began)
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base_rss
    print(f"{options.count} mutated headers in {seconds:.0f} s, slowest {slowest * 1000:.1f} ms of CPU, ", end="")
    print(f"memory grew by {grown / 1024:.1f} MiB")
    for outcome, n in outcomes.most_common():
        print(f"  {n:>8} {outcome}")


if __name__ == "__main__":
    main()
