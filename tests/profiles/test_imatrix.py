"""Profiles seeded from importance matrices, in the form that llama-imatrix writes now and in the older one."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.errors import ExpertdError, StateError
from expertd.runtime import imatrix
from expertd.runtime.profile import Shape
from tests.profiles.conftest import SHAPE

ROWS = {layer: [float((7 * layer + 3 * e) % 11 * 10) for e in range(16)] for layer in range(4)}
Tensors = Mapping[str, tuple[np.ndarray, np.ndarray]]


def _tensors(role: str = "gate", layers: range = range(4)) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(sums of squares, counts) by tensor, as llama-imatrix keeps them."""
    rng, made = np.random.default_rng(0), {}
    for layer in layers:
        counts = np.array(ROWS[layer], np.float32)
        sums = rng.random((16, 8), dtype=np.float32) * counts[:, None]
        made[f"blk.{layer}.ffn_{role}_exps.weight"] = (sums, counts)
    made["blk.0.attn_q.weight"] = (rng.random((1, 8), dtype=np.float32), np.array([500.0], np.float32))
    return made


def _write_gguf(path: Path, tensors: Tensors, kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["calibration.txt"])
    writer.add_uint32("imatrix.chunk_count", 10)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in tensors.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts.reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_dat(path: Path, tensors: Tensors, *, divided: bool = True, calls: int = 10) -> Path:
    out = struct.pack("<i", len(tensors))
    for name, (sums, counts) in tensors.items():
        values = sums.copy()
        if divided:
            values = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 1.0) * calls
        flat = values.astype("<f4").tobytes()
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(flat) // 4) + flat
    path.write_bytes(out + struct.pack("<ii", 10, 3) + b"txt")
    return path


def test_counts_of_the_gguf_form_are_the_profiles(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "x.gguf", _tensors())
    assert imatrix.is_imatrix(path)
    seed = imatrix.read(path, 16)
    assert seed.exact
    profile = imatrix.seed_profile("seeded", SHAPE, seed, str(path))
    assert profile.sources == ("imatrix x.gguf",)
    for layer, row in ROWS.items():
        found = profile.counts[layer * 16 : layer * 16 + 16]
        assert np.argsort(found).tolist() == np.argsort(row).tolist()
        assert sum(found) > 0
    assert profile.tokens == round(max(sum(r) for r in ROWS.values()) / 2)


@pytest.mark.parametrize("role", ["gate_up", "up", "down"])
def test_models_without_a_gate_tensor(tmp_path: Path, role: str) -> None:
    assert imatrix.read(_write_gguf(tmp_path / "x.gguf", _tensors(role)), 16).rows == ROWS


def test_the_gate_wins_whatever_the_order(tmp_path: Path) -> None:
    other = {n: (s, c * 0 + 1) for n, (s, c) in _tensors("down").items()}
    assert imatrix.read(_write_gguf(tmp_path / "a.gguf", {**other, **_tensors()}), 16).rows == ROWS
    assert imatrix.read(_write_gguf(tmp_path / "b.gguf", {**_tensors(), **other}), 16).rows == ROWS


def test_a_seed_does_not_drown_what_is_learnt_afterwards(tmp_path: Path) -> None:
    many = {n: (s, c * 1e6) for n, (s, c) in _tensors().items()}
    profile = imatrix.seed_profile("s", SHAPE, imatrix.read(_write_gguf(tmp_path / "x.gguf", many), 16), "x")
    before = profile.chances()[5]
    for _ in range(8000):
        profile.add(0, (14, 15), 2)
    assert profile.chances()[5] < 0.5 * before
    assert profile.hottest()[:2] == [14, 15]


def test_the_older_form_tells_what_was_never_used(tmp_path: Path) -> None:
    path = _write_dat(tmp_path / "imatrix.dat", _tensors())
    assert imatrix.is_imatrix(path)
    seed = imatrix.read(path, 16)
    assert not seed.exact
    for layer, row in ROWS.items():
        assert [c > 0 for c in seed.rows[layer]] == [c > 0 for c in row]


def test_the_older_form_undivided_keeps_the_order(tmp_path: Path) -> None:
    seed = imatrix.read(_write_dat(tmp_path / "imatrix.dat", _tensors(), divided=False), 16)
    for layer, row in ROWS.items():
        assert np.corrcoef(seed.rows[layer], row)[0, 1] > 0.8


def test_a_file_converted_from_the_older_form_is_told_apart(tmp_path: Path) -> None:
    made = {}
    for name, (sums, counts) in _tensors().items():
        flat = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 1.0) * 5120
        made[name] = (flat.reshape(1, -1).astype(np.float32), np.array([5120.0], np.float32))
    seed = imatrix.read(_write_gguf(tmp_path / "x.gguf", made), 16)
    assert not seed.exact
    assert [c > 0 for c in seed.rows[1]] == [c > 0 for c in ROWS[1]]


def test_experts_of_before_the_stacking(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = {
        f"blk.{layer}.ffn_gate.{e}.weight": (rng.random((1, 8), dtype=np.float32) * (e + 1), np.array([e + 1.0]))
        for layer in range(2) for e in (0, 2, 3)
    }  # fmt: skip
    seed = imatrix.read(_write_dat(tmp_path / "imatrix.dat", made, divided=False), 4)
    assert [c > 0 for c in seed.rows[0]] == [True, False, True, True]


@pytest.mark.parametrize("shape", [Shape("0" * 8, "m", 2, 16, 2), Shape("0" * 8, "m", 4, 8, 2)])
def test_another_models_matrix_is_refused(tmp_path: Path, shape: Shape) -> None:
    path = _write_gguf(tmp_path / "x.gguf", _tensors())
    with pytest.raises(StateError, match="the model has"):
        imatrix.seed_profile("s", shape, imatrix.read(path, shape.n_experts), str(path))


def test_a_model_is_no_matrix(demo_model: Path) -> None:
    with pytest.raises(StateError, match="no importance matrix"):
        imatrix.read(demo_model, 64)


def test_a_dense_models_matrix_knows_no_experts(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "x.gguf", _tensors(layers=range(0)))
    with pytest.raises(StateError, match="knows no experts"):
        imatrix.read(path, 16)


def test_damaged_files_are_said_in_one_line(tmp_path: Path) -> None:
    for make, name in ((_write_gguf, "x.gguf"), (_write_dat, "x.dat")):
        data = make(tmp_path / name, _tensors()).read_bytes()  # type: ignore[operator]
        cut = tmp_path / f"cut-{name}"
        for end in (0, 3, 4, 7, 8, 20, 60, 300, len(data) // 2):
            cut.write_bytes(data[:end])
            with pytest.raises(ExpertdError) as caught:
                imatrix.read(cut, 16)
            assert str(cut) in caught.value.message
            assert "\n" not in caught.value.message
    with pytest.raises(StateError, match="No such file"):
        imatrix.read(tmp_path / "nothing", 16)


def test_values_that_are_no_counts(tmp_path: Path) -> None:
    for bad in (np.nan, np.inf, -1.0):
        made = {n: (s, np.full_like(c, bad)) for n, (s, c) in _tensors().items()}
        with pytest.raises(StateError, match="no counts"):
            imatrix.read(_write_gguf(tmp_path / "x.gguf", made), 16)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(data)
    with pytest.raises(ExpertdError):
        imatrix.read(path, 16)
