from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertd.bench.geometry import Geometry, checked, from_file
from expertd.bench.presets import PRESETS, preset
from expertd.bench.tensors import sizes, tensors
from expertd.errors import BenchError, UsageError

# Sizes of the published 4-bit files (Q4_0 of llama.cpp's own conversions, MXFP4 of OpenAI's), in GB.
PUBLISHED = {
    "olmoe-1b-7b": 3.9,
    "qwen3-30b-a3b": 17.4,
    "qwen3-235b-a22b": 133,
    "mixtral-8x7b": 26.4,
    "gpt-oss-20b": 12.1,
    "gpt-oss-120b": 63.4,
    "deepseek-v2-lite": 8.9,
    "deepseek-v3": 379,
}


@pytest.mark.parametrize(("name", "gigabytes"), PUBLISHED.items())
def test_presets_come_out_at_the_size_of_the_real_file(name: str, gigabytes: float) -> None:
    assert sizes(preset(name)).total_nbytes / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound(name: str) -> None:
    g = checked(PRESETS[name])
    names = [t.name for t in tensors(g)]
    assert len(names) == len(set(names))
    found = sizes(g)
    assert found.expert_nbytes == found.one_expert_nbytes * g.experts * len(g.moe_layers)
    assert found.token_expert_nbytes < found.expert_nbytes < found.total_nbytes


def test_the_benchmark_geometry_is_exact() -> None:
    found = sizes(preset("qwen3-30b-a3b").changed(experts_used=6))
    assert found.one_expert_nbytes == 2_654_208
    assert found.expert_nbytes == 16_307_453_952
    assert found.token_expert_nbytes == 764_411_904


def test_rows_that_do_not_divide_fall_back_as_the_quantizer_does() -> None:
    g = preset("glm-4.5-air").changed(expert_type="Q4_K")
    kinds = {t.name.split(".")[-2]: t.type for t in tensors(g) if t.is_expert}
    assert kinds == {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q5_0"}


def test_a_file_gives_the_same_as_the_table(tmp_path: Path) -> None:
    numbers = {
        "arch": "qwen3moe", "layers": 4, "experts": 16, "experts_used": 2, "embedding": 256, "expert_ff": 64,
        "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 1024,
    }  # fmt: skip
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(numbers))
    as_toml = tmp_path / "mine.toml"
    as_toml.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in numbers.items()))
    assert from_file(as_json) == from_file(as_toml) == Geometry(name="mine", **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": None}, "missing layers"),
        ({"colour": 3}, "no such field: colour"),
        ({"experts": "many"}, "experts = 'many' is no number"),
        ({"experts": True}, "experts = True is no number"),
        ({"arch": "bert"}, "cannot write architecture bert"),
        ({"experts_used": 17}, "17 experts used of 16"),
        ({"expert_ff": 65}, "expert_ff = 65 is no multiple of 32"),
        ({"heads": 3}, "3 heads do not divide by 2 KV heads"),
        ({"vocab": 100}, "vocab = 100 is below 512"),
        ({"layers": 0}, "layers = 0 is below 1"),
        ({"dense_layers": 4}, "leave none that routes"),
        ({"shared_experts": 1}, "qwen3moe has no dense layers and no shared experts"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    numbers = {
        "arch": "qwen3moe", "layers": 4, "experts": 16, "experts_used": 2, "embedding": 256, "expert_ff": 64,
        "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 1024, **change,
    }  # fmt: skip
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({k: v for k, v in numbers.items() if v is not None}))
    with pytest.raises(UsageError, match=message) as caught:
        from_file(path)
    assert "\n" not in caught.value.line()


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        from_file(tmp_path / "absent.json")
    for name, text in (("a.json", "{"), ("b.toml", "= 3"), ("c.json", "[1]")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UsageError):
            from_file(path)
    with pytest.raises(UsageError, match="no geometry gpt-9"):
        preset("gpt-9")


def test_lite_deepseek_keeps_its_layers() -> None:
    with pytest.raises(UsageError, match="only at 26 or 27 layers"):
        preset("deepseek-v2-lite").changed(layers=4)
    with pytest.raises(UsageError, match="any number of layers but 26 and 27"):
        preset("deepseek-v3").changed(layers=27)


def test_unknown_tensor_types() -> None:
    with pytest.raises(UsageError, match="no tensor type Q9_9"):
        sizes(preset("olmoe-1b-7b").changed(expert_type="Q9_9"))
