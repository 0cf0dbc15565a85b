"""The expert map: each layout of experts to the byte, and buckets that add up to the file's tensor data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from model_gguf_bytes import (
    TYPE_F16,
    TYPE_Q4_0,
    TYPE_Q4_K,
    Tensor,
    attention_layer,
    moe_keys,
    moe_layer,
    moe_tensors,
    outer,
    write,
)  # fmt: skip

from expertd.errors import ModelUnsupportedError
from expertd.model.expertmap import ExpertMap, build_map
from expertd.model.gguf import read_model
from expertd.model.names import Role, role_of
from expertd.model.report import active_elements, inspect_report, layer_rows, tensor_rows


def mapped(path: Path, keys: dict[str, object], tensors: list[Tensor]) -> ExpertMap:
    experts = build_map(read_model(write(path, keys, tensors)))
    assert sum(experts.buckets.values()) == experts.model.tensor_nbytes == sum(t.size for t in tensors)
    check_layout(experts)
    return experts


def check_layout(experts: ExpertMap) -> None:
    """Extents of experts and dense weights never overlap, lie in the files, and cover all but nextn blocks."""
    if experts.unsupported:
        return
    layout = experts.layout()
    spans = [(e.file, e.offset, e.end) for e in layout.dense]
    for m in layout.layers:
        for i in range(m.n_experts):
            spans += [(e.file, e.offset, e.end) for e in layout.extents(layout.expert_id(m.layer, i)) if e.nbytes]
    spans.sort()
    for (file, _, end), (other, start, _) in pairwise(spans):
        assert file != other or end <= start
    assert all(end <= layout.file_nbytes[file] for file, _, end in spans)
    covered = sum(end - start for _, start, end in spans)
    assert covered == experts.model.tensor_nbytes - experts.buckets[Role.NEXTN]
    assert layout.expert_nbytes == experts.expert_nbytes
    assert layout.dense_nbytes == experts.dense_nbytes + experts.buckets[Role.UNKNOWN]


def test_the_built_in_model(demo_model: Path) -> None:
    experts = build_map(read_model(demo_model))
    check_layout(experts)
    assert (experts.n_layers, experts.n_experts, experts.n_experts_used) == (8, 64, 4)
    assert (experts.expert_nbytes, experts.dense_nbytes) == (7077888, 2544640)
    assert experts.buckets[Role.ROUTER] == 8 * 256 * 64 * 4
    assert experts.token_expert_nbytes == experts.layout().token_nbytes == 8 * 4 * 13824
    # Of the token embeddings one row is read: 256 elements in Q8_0.
    assert experts.token_dense_nbytes == 2544640 - 557056 + 272
    first = experts.layout().by_layer[0].tensors
    assert [(t.role, t.stride) for t in first] == [("gate", 4608), ("up", 4608), ("down", 4608)]
    assert first[1].extent(3).offset == 1653664 + 3 * 4608
    assert experts.warnings == ()


def test_separate_gate_up_and_down(tmp_path: Path) -> None:
    experts = mapped(tmp_path / "m.gguf", moe_keys(2), moe_tensors(2))
    expert = 3 * (256 * 64 // 32 * 18)
    assert [m.expert_nbytes for m in experts.layers] == [expert, expert]
    assert experts.expert_nbytes == 2 * 8 * expert
    assert experts.layout().expert_sizes == [expert] * 16


def test_merged_gate_and_up(tmp_path: Path) -> None:
    tensors = [
        *outer(256, 128), *attention_layer(0, 256, 128),
        Tensor("blk.0.ffn_gate_inp.weight", (256, 4)),
        Tensor("blk.0.ffn_down_exps.weight", (64, 256, 4), TYPE_Q4_0),
        Tensor("blk.0.ffn_gate_up_exps.weight", (256, 128, 4), TYPE_Q4_K),
    ]  # fmt: skip
    layout = mapped(tmp_path / "m.gguf", moe_keys(1, n=4), tensors).layout()
    assert [(t.role, t.stride) for t in layout.layers[0].tensors] == [("gate_up", 128 * 144), ("down", 256 * 2 * 18)]


def test_biases_shared_experts_routers_and_group_experts_are_dense(tmp_path: Path) -> None:
    small = {
        "blk.0.ffn_gate_exps.bias": ((64, 8), Role.EXPERT_BIAS),
        "blk.0.ffn_down_exps.bias": ((256, 8), Role.EXPERT_BIAS),
        "blk.0.ffn_up_exps.scale": ((8,), Role.EXPERT_BIAS),
        "blk.0.ffn_gate_shexp.weight": ((256, 32), Role.SHARED_EXPERT),
        "blk.0.ffn_up_shexp.weight": ((256, 32), Role.SHARED_EXPERT),
        "blk.0.ffn_down_shexp.weight": ((32, 256), Role.SHARED_EXPERT),
        "blk.0.ffn_gate_inp_shexp.weight": ((256,), Role.ROUTER),
        "blk.0.exp_probs_b.bias": ((8,), Role.ROUTER),
        "blk.0.ffn_gate_chexps.weight": ((256, 16, 4), Role.GROUP_EXPERT),
        "blk.0.ffn_norm_exps.weight": ((256,), Role.DENSE),
        "blk.0.mystery.weight": ((256,), Role.UNKNOWN),
        "mystery.weight": ((64,), Role.UNKNOWN),
    }
    tensors = moe_tensors(1) + [Tensor(name, shape) for name, (shape, _) in small.items()]
    experts = mapped(tmp_path / "m.gguf", moe_keys(1), tensors)
    for name, (_, role) in small.items():
        assert role_of(name, 1, 1) is role, name
    assert experts.buckets[Role.EXPERT_BIAS] == 4 * (64 * 8 + 256 * 8 + 8)
    assert experts.buckets[Role.SHARED_EXPERT] == 4 * 3 * 256 * 32
    assert experts.buckets[Role.ROUTER] == 4 * (256 * 8 + 256 + 8)
    assert experts.buckets[Role.GROUP_EXPERT] == 4 * 256 * 16 * 4
    assert experts.buckets[Role.UNKNOWN] == 4 * (256 + 64)
    assert experts.buckets[Role.EXPERT] == 8 * 3 * 256 * 64 // 32 * 18
    assert any("chexps" in w for w in experts.warnings)
    assert any("2 tensors of unknown purpose, 1280 bytes, first 'blk.0.mystery.weight'" in w for w in experts.warnings)


def old_mixtral(n_layers: int = 2, n: int = 4) -> list[Tensor]:
    tensors = outer(256, 128)
    for i in range(n_layers):
        tensors += [*attention_layer(i, 256, 128), Tensor(f"blk.{i}.ffn_gate_inp.weight", (256, n))]
        for e in range(n):
            tensors += [Tensor(f"blk.{i}.ffn_{r}.{e}.weight", s, TYPE_Q4_0)
                        for r, s in (("gate", (256, 64)), ("down", (64, 256)), ("up", (256, 64)))]  # fmt: skip
    return tensors


def test_one_tensor_per_expert_is_counted_and_refused(tmp_path: Path) -> None:
    experts = mapped(tmp_path / "m.gguf", moe_keys(2, n=4), old_mixtral())
    expert = 3 * 256 * 64 // 32 * 18
    assert experts.expert_nbytes == 2 * 4 * expert
    assert [(m.n_experts, m.used, m.expert_nbytes) for m in experts.layers] == [(4, 2, expert)] * 2
    assert any("re-convert, it cannot be loaded" in w for w in experts.warnings)
    with pytest.raises(ModelUnsupportedError, match="one tensor each") as caught:
        experts.layout()
    assert "re-convert" in caught.value.hint
    rows = layer_rows(experts)[0]["tensors"]
    assert rows[0]["role"] == "down of expert 0"
    assert len(rows) == 12


def test_leading_dense_layers_and_every_second_layer(tmp_path: Path) -> None:
    tensors = outer(256, 128)
    for i in range(5):
        tensors += attention_layer(i, 256, 128)
        if i in (2, 4):
            tensors += moe_layer(i, 256, 64, 8)
        else:
            tensors += [Tensor(f"blk.{i}.ffn_up.weight", (256, 512), TYPE_Q4_0)]
    experts = mapped(tmp_path / "m.gguf", moe_keys(5), tensors)
    layout = experts.layout()
    assert [m.layer for m in layout.layers] == [2, 4]
    assert (layout.n_layers, layout.n_experts) == (5, 8)
    assert layout.expert_sizes[:16] == [0] * 16
    assert layout.expert_sizes[16:24] == [layout.layers[0].expert_nbytes] * 8
    assert layout.place(layout.expert_id(4, 7)) == (4, 7)


def test_the_block_of_multi_token_prediction_has_its_own_bucket(tmp_path: Path) -> None:
    nextn = [
        *attention_layer(2, 256, 128),
        *moe_layer(2, 256, 64, 8),
        Tensor("blk.2.nextn.eh_proj.weight", (512, 256), TYPE_F16),
        Tensor("blk.2.nextn.embed_tokens.weight", (256, 128), TYPE_F16),
    ]
    keys = moe_keys(3, qwen3moe__nextn_predict_layers=1)
    experts = mapped(tmp_path / "m.gguf", keys, moe_tensors(2) + nextn)
    assert (experts.n_layers, experts.n_nextn) == (2, 1)
    assert experts.buckets[Role.NEXTN] == sum(t.size for t in nextn)
    assert [m.layer for m in experts.layers] == [0, 1]
    assert any("multi-token prediction" in w for w in experts.warnings)
    without = mapped(tmp_path / "n.gguf", keys, moe_tensors(2))
    assert (without.n_layers, without.n_nextn) == (2, 1)
    assert any("not in this file" in w for w in without.warnings)


def test_keys_that_are_absent_or_wrong(tmp_path: Path) -> None:
    keys = moe_keys(2)
    del keys["qwen3moe.expert_count"], keys["qwen3moe.block_count"]
    experts = mapped(tmp_path / "m.gguf", keys, moe_tensors(2))
    assert (experts.n_layers, experts.n_experts) == (2, 8)
    keys["qwen3moe.expert_count"] = 99
    keys["qwen3moe.block_count"] = 60000
    del keys["qwen3moe.expert_used_count"]
    experts = mapped(tmp_path / "n.gguf", keys, moe_tensors(2))
    assert (experts.n_layers, experts.n_experts, experts.n_experts_used) == (2, 8, 8)
    assert "qwen3moe.expert_count says 99, the tensors hold 8" in experts.warnings
    assert any("expert_used_count is absent: 8 experts a token assumed" in w for w in experts.warnings)


def test_another_number_of_used_experts_in_each_layer(tmp_path: Path) -> None:
    experts = mapped(tmp_path / "m.gguf", moe_keys(2) | {"qwen3moe.expert_used_count": [2, 6]}, moe_tensors(2))
    assert [m.used for m in experts.layers] == [2, 6]
    assert experts.n_experts_used == 6
    assert experts.token_expert_nbytes == 8 * experts.layers[0].expert_nbytes


def test_a_dense_model(tmp_path: Path) -> None:
    tensors = [*outer(256, 128), *attention_layer(0, 256, 128), Tensor("blk.0.ffn_up.weight", (256, 512), TYPE_Q4_0)]
    experts = mapped(tmp_path / "m.gguf", {"general.architecture": "llama", "llama.block_count": 1}, tensors)
    assert "no experts: steering gives nothing" in experts.warnings
    assert experts.layout().layers == ()
    assert experts.layout().expert_sizes == [0] * 0


def test_tied_embeddings_are_read_in_whole(tmp_path: Path) -> None:
    tensors = [t for t in moe_tensors(1) if t.name != "output.weight"]
    experts = mapped(tmp_path / "m.gguf", moe_keys(1), tensors)
    assert experts.token_dense_nbytes == experts.dense_nbytes


def test_expert_tensors_that_disagree(tmp_path: Path) -> None:
    tensors = [*outer(256, 128), *moe_layer(0, 256, 64, 8)[:3], Tensor("blk.0.ffn_down_exps.weight", (64, 256, 4))]
    experts = mapped(tmp_path / "m.gguf", moe_keys(1), tensors)
    with pytest.raises(ModelUnsupportedError, match=r"disagree on the number of experts: \[4, 8\]"):
        experts.layout()
    odd = [*outer(256, 128), Tensor("blk.0.ffn_up_exps.weight", (64, 40, 5), 153, nbytes=3233)]
    with pytest.raises(ModelUnsupportedError, match="no whole number of bytes each"):
        build_map(read_model(write(tmp_path / "odd.gguf", moe_keys(1), odd))).layout()


def test_expert_tensors_without_experts(tmp_path: Path) -> None:
    tensors = [*outer(256, 128), Tensor("blk.0.ffn_up_exps.weight", (256, 64, 0), TYPE_Q4_0)]
    experts = build_map(read_model(write(tmp_path / "m.gguf", moe_keys(1), tensors)))
    assert experts.token_expert_nbytes == 0
    with pytest.raises(ModelUnsupportedError, match="hold no experts"):
        experts.layout()


def test_what_is_no_language_model_is_said(tmp_path: Path) -> None:
    vision = build_map(read_model(write(tmp_path / "m.gguf", {"general.architecture": "clip"}, [Tensor("v.a", (8,))])))
    assert any("no language model of its own" in w for w in vision.warnings)
    nameless = build_map(read_model(write(tmp_path / "n.gguf", {}, [])))
    assert any("general.architecture is absent" in w for w in nameless.warnings)


def test_footprint_and_speed_are_two_figures(tmp_path: Path) -> None:
    """F7: twice as many experts, of which as many are used: twice the bytes, the same bytes a token."""
    one = mapped(tmp_path / "one.gguf", moe_keys(2, n=8), moe_tensors(2, n=8))
    two = mapped(tmp_path / "two.gguf", moe_keys(2, n=16), moe_tensors(2, n=16))
    assert two.expert_nbytes == 2 * one.expert_nbytes
    assert two.token_expert_nbytes == one.token_expert_nbytes
    expert = 3 * 256 * 64
    assert two.model.n_elements - one.model.n_elements == 2 * 8 * (expert + 256)
    assert active_elements(two) - active_elements(one) == 2 * 8 * 256


def test_the_report_has_the_contracts_keys(demo_model: Path) -> None:
    experts = build_map(read_model(demo_model))
    report = inspect_report(experts, "f" * 32)
    assert {
        "arch", "name", "files", "file_bytes", "tensors", "layers", "moe_layers", "experts", "experts_used",
        "expert_bytes", "dense_bytes", "other_bytes", "expert_size_bytes", "bytes_per_token", "quant", "warnings",
    } <= report.keys()  # fmt: skip
    assert report["other_bytes"] == {"nextn": 0, "unknown": 0}
    assert report["expert_size_bytes"] == {"min": 13824, "max": 13824}
    assert report["quant"] == {"Q4_0": 7962624, "Q8_0": 1114112, "F32": 545792}
    assert sum(report["quant"].values()) == report["expert_bytes"] + report["dense_bytes"] == report["tensor_bytes"]
    assert report["header_bytes"] + report["padding_bytes"] + report["tensor_bytes"] == report["file_bytes"]
    assert sum(report["dense_parts"].values()) == report["dense_bytes"]
    rows = layer_rows(experts)
    assert sum(r["expert_bytes"] for r in rows) == report["expert_bytes"]
    assert rows[0]["tensors"][0]["offset"] == 1358752
    assert sum(t["bytes"] for t in tensor_rows(experts)) == report["tensor_bytes"]


def test_every_tensor_name_of_the_gguf_package_is_known() -> None:
    from gguf.constants import TENSOR_NAMES

    names = [name.format(bid=1, xid=0) + ".weight" for name in TENSOR_NAMES.values()]
    assert [name for name in names if role_of(name, 4, 4) is Role.UNKNOWN] == []
