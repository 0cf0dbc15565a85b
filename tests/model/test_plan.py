"""The plan on headers alone: the verdict by the ratio, what is needed beside the experts, what is chosen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from model_gguf_bytes import TYPE_Q4_0, Tensor, attention_layer, moe_keys, outer, write

from expertd.errors import ModelUnsupportedError, UsageError
from expertd.model.commands import expertd_flags
from expertd.model.expertmap import ExpertMap, build_map
from expertd.model.gguf import read_model
from expertd.model.plan import PROCESS_NBYTES, Machine, Wish, default_context, make_plan

MIB, GIB = 1 << 20, 1 << 30


def ram_for(experts: ExpertMap, ratio: float, wish: Wish) -> int:
    """RAM with which the ratio comes out as wanted."""
    fixed = make_plan(experts, Machine(ram_nbytes=1 << 40), wish).fixed_nbytes
    return fixed + math.ceil(ratio * experts.expert_nbytes)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (1.5, "fits"), (1.0, "fits"), (0.99, "good"), (0.7, "good"), (0.69, "usable"), (0.4, "usable"),
        (0.39, "poor"), (0.0, "poor"),
    ],
)  # fmt: skip
def test_the_verdict_follows_the_ratio(big: ExpertMap, ratio: float, verdict: str) -> None:
    wish = Wish(n_ubatch=512, kv_type="f16")
    plan = make_plan(big, Machine(ram_nbytes=ram_for(big, ratio, wish)), wish)
    assert plan.verdict == verdict
    assert plan.ram_ratio == pytest.approx(ratio, abs=1e-9)
    assert plan.streams == (ratio < 1)
    assert plan.expert_budget_nbytes == math.ceil(min(ratio, 1) * big.expert_nbytes)


def test_what_is_needed_beside_the_experts_is_the_sum_of_its_parts(big: ExpertMap) -> None:
    machine = Machine(ram_nbytes=32 * GIB, reserve_nbytes=100 * MIB)
    plan = make_plan(big, machine, Wish(n_ctx=8192, n_ubatch=512, kv_type="f16"))
    kv = 94 * 2 * 512 * 2 * 8192
    assert plan.kv.total == kv
    assert plan.output_nbytes == 151936 * 4
    # Gates, ups and products of 8 experts a token, four hidden states, and the mask are the peak of the buffer.
    peak = 512 * 4 * (3 * 8 * 1408 + 4 * 2048) + 512 * 8192 * 2
    assert plan.compute_nbytes == pytest.approx(peak, rel=0.001)
    parts = big.dense_nbytes + kv + plan.compute_nbytes + plan.output_nbytes + PROCESS_NBYTES + 100 * MIB
    assert plan.fixed_nbytes == parts
    assert plan.left_nbytes == 32 * GIB - parts
    assert plan.total_nbytes == big.model.tensor_nbytes + kv + plan.compute_nbytes + plan.output_nbytes


def test_too_little_for_anything_is_said(big: ExpertMap) -> None:
    plan = make_plan(big, Machine(ram_nbytes=GIB), Wish())
    assert (plan.verdict, plan.ram_ratio, plan.expert_budget_nbytes) == ("poor", 0.0, 0)
    assert any("more than there is" in w for w in plan.warnings)


def test_less_than_one_tokens_experts_is_said(big: ExpertMap) -> None:
    wish = Wish(n_ubatch=512)
    plan = make_plan(big, Machine(ram_nbytes=ram_for(big, 0.03, wish)), wish)
    assert any("below what one token reads" in w for w in plan.warnings)


def test_the_cache_type_follows_its_share_of_the_memory(big: ExpertMap) -> None:
    assert make_plan(big, Machine(ram_nbytes=32 * GIB), Wish(n_ctx=8192)).kv_type == "f16"
    assert make_plan(big, Machine(ram_nbytes=32 * GIB), Wish(n_ctx=40960)).kv_type == "q8_0"
    assert make_plan(big, Machine(ram_nbytes=32 * GIB), Wish(n_ctx=40960, kv_type="f16")).kv_type == "f16"
    assert make_plan(big, Machine(ram_nbytes=32 * GIB), Wish(n_ctx=40960, flash=False)).kv_type == "f16"


def test_a_wider_micro_batch_where_experts_are_read_again_for_each(big: ExpertMap) -> None:
    streaming, fitting = Machine(ram_nbytes=40 * GIB), Machine(ram_nbytes=80 * GIB)
    assert make_plan(big, fitting, Wish()).n_ubatch == 512
    assert make_plan(big, streaming, Wish()).n_ubatch == 2048
    assert make_plan(big, streaming, Wish(n_ctx=2000)).n_ubatch == 1024
    # What a wider one costs is 2 % of the memory at most.
    assert make_plan(big, Machine(ram_nbytes=8 * GIB), Wish()).n_ubatch == 1024
    assert make_plan(big, streaming, Wish(n_ubatch=256)).n_ubatch == 256
    assert make_plan(big, streaming, Wish(n_ctx=300, n_ubatch=512)).n_ubatch == 300


def test_wishes_that_contradict(big: ExpertMap) -> None:
    machine = Machine(ram_nbytes=32 * GIB)
    with pytest.raises(UsageError, match="needs flash attention"):
        make_plan(big, machine, Wish(kv_type="q8_0", flash=False))
    with pytest.raises(UsageError, match="'int3' is no KV cache type"):
        make_plan(big, machine, Wish(kv_type="int3"))
    with pytest.raises(UsageError, match="at least one token"):
        make_plan(big, machine, Wish(n_ctx=0))
    plan = make_plan(big, machine, Wish(n_ctx=100_000, kv_type="q4_0"))
    assert any("longer than the 40960 tokens" in w for w in plan.warnings)
    assert any("q4_0 costs quality" in w for w in plan.warnings)


def test_a_default_context_is_never_longer_than_trained(big: ExpertMap, demo_model: Path) -> None:
    assert default_context(big) == 4096
    assert default_context(build_map(read_model(demo_model))) == 1024


def test_a_layout_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    tensors = [*outer(256, 128), Tensor("blk.0.ffn_up.0.weight", (256, 64), TYPE_Q4_0)]
    experts = build_map(read_model(write(tmp_path / "m.gguf", moe_keys(1), tensors)))
    with pytest.raises(ModelUnsupportedError, match="one tensor each"):
        make_plan(experts, Machine(ram_nbytes=GIB), Wish())


def test_a_dense_model_fits_or_does_not(tmp_path: Path) -> None:
    tensors = outer(256, 128)
    for i in range(4):
        tensors += [*attention_layer(i, 256, 128), Tensor(f"blk.{i}.ffn_up.weight", (256, 65536), TYPE_Q4_0)]
    experts = build_map(read_model(write(tmp_path / "m.gguf", moe_keys(4), tensors)))
    assert make_plan(experts, Machine(ram_nbytes=GIB), Wish()).verdict == "fits"
    plan = make_plan(experts, Machine(ram_nbytes=250 * MIB), Wish())
    assert plan.verdict == "poor"
    assert expertd_flags(plan)[2].args == ("--steering", "off")


def test_the_report_is_json_with_the_contracts_keys(big: ExpertMap) -> None:
    from expertd.cli.plan import plan_report

    plan = make_plan(big, Machine(ram_nbytes=30 * GIB, vram_nbytes=8 * GIB, n_gpus=1), Wish())
    report = json.loads(json.dumps(plan_report(plan)))
    assert {
        "verdict", "ram_ratio", "kv_bytes", "compute_bytes", "dense_bytes", "expert_budget_bytes", "vram",
        "llama_server_args", "expertd_args", "reasons",
    } <= report.keys()  # fmt: skip
    assert {"n_gpu_layers", "n_cpu_moe", "bytes"} <= report["vram"].keys()
    assert report["expertd_args"][0] == "serve"
