from __future__ import annotations

from pathlib import Path

import pytest

from expertd.bench import inflate
from expertd.bench.arm import run
from expertd.bench.geometry import Geometry
from expertd.bench.spec import Arm, Kind, Prompt, RunSpec
from expertd.bench.synth import write as write_synth
from expertd.errors import UsageError
from expertd.model.expertmap import build_map
from expertd.model.gguf import read_model

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def words(model: Path) -> tuple[int, ...]:
    spec = RunSpec(Arm("plain", Kind.PLAIN), str(model), (Prompt("", PROMPT),), n_tokens=12, n_ctx=256, threads=2)
    return run(spec, lambda line: None).prompts[0].output


def test_the_inflated_model_says_the_same(tmp_path: Path, demo_model: Path) -> None:
    job = inflate.plan(60 << 20)
    assert job.ff == 256
    path = tmp_path / job.file_name()
    assert inflate.write(job, path)
    assert words(path) == words(demo_model)
    assert not inflate.write(job, path), "made already"


def test_sizes_and_layout(tmp_path: Path, demo_model: Path) -> None:
    job = inflate.plan(70_000_000)
    path = tmp_path / "big.gguf"
    inflate.write(job, path)
    assert abs(path.stat().st_size - job.nbytes) < 4096
    assert path.stat().st_size <= 70_000_000
    assert path.stat().st_blocks * 512 >= job.nbytes, "no holes"
    small, big = build_map(read_model(demo_model)), build_map(read_model(path))
    assert big.expert_nbytes == small.expert_nbytes * job.ff // job.source_ff
    assert big.dense_nbytes == small.dense_nbytes
    assert big.layout().n_experts_used == small.layout().n_experts_used


def test_the_size_decides_the_width() -> None:
    for nbytes in (1 << 30, 2 << 30, 5_400_000_000):
        job = inflate.plan(nbytes)
        assert job.nbytes <= nbytes < job.nbytes * 1.08
    with pytest.raises(UsageError, match="cannot be as small as"):
        inflate.plan(20_000_000)


def test_types_whose_zero_is_unknown(tmp_path: Path, small_geometry: Geometry) -> None:
    source = tmp_path / "source.gguf"
    write_synth(small_geometry.changed(expert_type="MXFP4"), source)
    job = inflate.plan(30 << 20, source)
    with pytest.raises(UsageError, match="cannot inflate experts of type MXFP4"):
        inflate.write(job, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    assert not list(tmp_path.glob("*.part"))
