"""What goes to the GPU: the fewest experts in RAM, whole layers, or nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_gguf_bytes import moe_keys, moe_layer, moe_tensors, write

from expertd.model.commands import arguments, llama_server_flags
from expertd.model.expertmap import ExpertMap, build_map
from expertd.model.gguf import read_model
from expertd.model.offload import ALL_LAYERS, SPARE_NBYTES, choose_offload, override_rules
from expertd.model.plan import Machine, Wish, make_plan

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("vram", [6, 12, 16, 24, 48, 80])
def test_the_fewest_experts_in_ram_with_a_gigabyte_to_spare(big: ExpertMap, vram: int) -> None:
    plan = make_plan(big, Machine(ram_nbytes=64 * GIB, vram_nbytes=vram * GIB, n_gpus=1), Wish(n_ubatch=512))
    off = plan.offload
    assert off.n_gpu_layers == ALL_LAYERS
    assert off.nbytes + SPARE_NBYTES <= vram * GIB
    layer = big.layers[0].nbytes
    if off.n_cpu_moe:
        # One layer more would not have left the spare gigabyte.
        assert off.nbytes + layer + SPARE_NBYTES > vram * GIB
    assert off.expert_nbytes == (94 - off.n_cpu_moe) * layer
    assert plan.ram_expert_nbytes == off.n_cpu_moe * layer
    assert plan.ram_ratio == (plan.left_nbytes / plan.ram_expert_nbytes if off.n_cpu_moe else plan.ram_ratio)


def test_nothing_of_the_experts_is_left_in_ram_when_all_fit(big: ExpertMap) -> None:
    plan = make_plan(big, Machine(ram_nbytes=4 * GIB, vram_nbytes=80 * GIB, n_gpus=1), Wish())
    assert (plan.verdict, plan.offload.n_cpu_moe, plan.ram_expert_nbytes) == ("fits", 0, 0)
    assert override_rules(big, plan.offload) == ()


def test_whole_layers_when_not_even_attention_fits(big: ExpertMap) -> None:
    wish = Wish(n_ctx=40960, kv_type="f16", n_ubatch=512)
    plan = make_plan(big, Machine(ram_nbytes=64 * GIB, vram_nbytes=6 * GIB, n_gpus=1), wish)
    off = plan.offload
    assert 1 < off.n_gpu_layers < 94
    assert off.n_cpu_moe == 94
    assert off.nbytes + SPARE_NBYTES <= 6 * GIB
    # The output counts as one layer; each other one takes its KV cache along.
    assert off.kv_nbytes == (off.n_gpu_layers - 1) * 2 * 512 * 2 * 40960
    assert plan.kv.total - off.kv_nbytes < plan.fixed_nbytes


def test_vram_that_is_of_no_use(big: ExpertMap) -> None:
    plan = make_plan(big, Machine(ram_nbytes=64 * GIB, vram_nbytes=GIB, n_gpus=1), Wish())
    assert not plan.offload.used
    assert any("nothing useful fits in the VRAM" in w for w in plan.warnings)
    args = arguments(llama_server_flags(plan))
    assert args[args.index("-ngl") + 1] == "0"


def test_each_gpu_keeps_its_own_spare(big: ExpertMap) -> None:
    kv = make_plan(big, Machine(ram_nbytes=64 * GIB), Wish()).kv
    one = choose_offload(big, kv, 600 * MIB, 24 * GIB, 1)
    two = choose_offload(big, kv, 600 * MIB, 24 * GIB, 2)
    assert two.n_cpu_moe > one.n_cpu_moe


def test_override_rules_say_the_same_as_the_number(tmp_path: Path) -> None:
    tensors = moe_tensors(1) + moe_layer(12, 256, 64, 8) + moe_layer(2, 256, 64, 8)
    experts = build_map(read_model(write(tmp_path / "m.gguf", moe_keys(13), tensors)))
    kv = make_plan(experts, Machine(ram_nbytes=GIB), Wish()).kv
    layer = experts.layers[0].nbytes
    full = choose_offload(experts, kv, 0, 1 << 40)
    room = full.nbytes - layer + sum(sorted(t.nbytes for t in experts.layers[0].tensors)[-2:])
    part = choose_offload(experts, kv, 0, SPARE_NBYTES + room)
    assert part.n_cpu_moe == 1
    (rule,) = override_rules(experts, part)
    pattern, buffer = rule.rsplit("=", 1)
    assert buffer == "CPU"
    moved = {t.name for t in experts.model.tensors if re.search(pattern, t.name)}
    assert moved == {t.name for t in experts.layers[0].tensors}
