from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as L

from expertd.bench import synth
from expertd.bench.geometry import Geometry
from expertd.bench.presets import PRESETS, preset
from expertd.bench.tensors import sizes
from expertd.engine.model import start_backend
from expertd.errors import BenchError, UsageError
from expertd.model.expertmap import build_map
from expertd.model.gguf import read_model


def shrunk(g: Geometry) -> Geometry:
    """The same architecture, small enough to write in a moment."""
    lite = g.arch == "deepseek2" and not g.q_lora
    heads = min(g.heads, 8)
    return g.changed(
        layers=27 if lite else g.dense_layers + 2,
        experts=16,
        experts_used=min(4, g.experts_used),
        vocab=1024,
        heads=heads,
        kv_heads=max(1, heads // (g.heads // g.kv_heads)) if g.arch != "deepseek2" else 1,
        embedding=heads * g.head_dim if g.arch == "olmoe" else 256,
        expert_ff=64,
        dense_ff=256 if g.dense_ff else 0,
        q_lora=64 if g.q_lora else 0,
        kv_lora=64 if g.kv_lora else 0,
        keys={**g.keys, "expert_group_count": 4, "expert_group_used_count": 2}
        if "expert_group_count" in g.keys
        else dict(g.keys),
    )


def logits(path: Path, vocab: int) -> np.ndarray:
    """Of eight tokens in llama.cpp, shape [vocab]."""
    start_backend()
    params = L.llama_model_default_params()
    params.use_extra_bufts = False
    model = L.llama_model_load_from_file(str(path).encode(), params)
    assert model, "llama.cpp does not load it"
    settings = L.llama_context_default_params()
    settings.n_ctx = 128
    context = L.llama_init_from_model(model, settings)
    tokens = (L.llama_token * 8)(*range(300, 308))
    assert L.llama_decode(context, L.llama_batch_get_one(tokens, 8)) == 0
    found = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (vocab,)).copy()
    L.llama_free(context)
    L.llama_model_free(model)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_llama_cpp_runs_every_preset_in_small(name: str, tmp_path: Path) -> None:
    g = shrunk(preset(name))
    path = tmp_path / synth.file_name(g)
    assert synth.write(g, path)
    found = logits(path, g.vocab)
    assert np.isfinite(found).all()
    assert 0.3 < found.std() < 3, "activations should neither vanish nor explode"
    layout = build_map(read_model(path)).layout()
    assert [m.layer for m in layout.layers] == list(g.moe_layers)
    assert layout.n_experts == g.experts
    assert layout.n_experts_used == g.experts_used


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_0", "Q8_0", "MXFP4", "F16"])
def test_block_types(kind: str, tmp_path: Path, small_geometry: Geometry) -> None:
    g = small_geometry.changed(expert_type=kind, expert_ff=256)
    path = tmp_path / "m.gguf"
    synth.write(g, path)
    assert np.isfinite(logits(path, g.vocab)).all()


def test_sizes_are_told_before_they_are_written(tmp_path: Path, small_geometry: Geometry) -> None:
    path = tmp_path / "m.gguf"
    seen: list[tuple[int, int]] = []
    synth.write(small_geometry, path, progress=lambda done, total: seen.append((done, total)))
    told = sizes(small_geometry)
    assert seen[-1] == (told.total_nbytes, told.total_nbytes)
    assert told.total_nbytes <= path.stat().st_size <= synth.expected_nbytes(small_geometry)
    assert path.stat().st_blocks * 512 >= told.total_nbytes, "no holes: every byte must come from the disk"
    assert build_map(read_model(path)).expert_nbytes == told.expert_nbytes


def test_the_same_is_not_made_twice_and_another_is(tmp_path: Path, small_geometry: Geometry) -> None:
    path = tmp_path / "m.gguf"
    assert synth.write(small_geometry, path)
    before = path.read_bytes()
    assert not synth.write(small_geometry, path)
    assert synth.write(small_geometry, path, seed=1)
    assert path.read_bytes() != before
    assert synth.write(small_geometry, path)
    assert path.read_bytes() == before, "the seed decides every byte"


@contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    """As on a full disk: writing beyond fails (EFBIG for ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, small_geometry: Geometry) -> None:
    with _files_of_at_most(1 << 20), pytest.raises(BenchError, match="File too large"):
        synth.write(small_geometry, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_types_without_random_blocks(tmp_path: Path, small_geometry: Geometry) -> None:
    with pytest.raises(UsageError, match="cannot make random IQ4_NL blocks"):
        synth.write(small_geometry.changed(expert_type="IQ4_NL"), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
