"""`expertd warm` without a daemon: dense first, hottest first, split files, limits, going on, dropping, holding."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from expertd.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from expertd.model.expertmap import build_map
from expertd.model.fingerprint import fingerprint
from expertd.model.gguf import read_model
from expertd.pages import libc, residency, warming
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.warming import WarmProgress, plan_warm, verify, warm_steps
from expertd.runtime.profile import Profile, Shape
from expertd.runtime.profile_file import ProfileDirectory
from expertd.types import ExpertLayout, Extent

pytestmark = pytest.mark.linux65


@pytest.fixture(scope="module")
def model(demo_model: Path, scratch: Path) -> Path:
    """A copy of the built-in model that nobody else maps."""
    path = scratch / "warm.gguf"
    shutil.copyfile(demo_model, path)
    with path.open("rb") as f:
        os.fsync(f.fileno())
    return path


@pytest.fixture(scope="module")
def split(scratch: Path) -> Path:
    """The first of several shards of a model with 2 layers x 8 experts of about 110 KB."""
    stem = scratch / "split"
    writer = gguf.GGUFWriter(stem, "qwen3moe", split_max_tensors=4)
    writer.add_block_count(2)
    writer.add_embedding_length(96)
    writer.add_context_length(128)
    writer.add_feed_forward_length(96)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    rng = np.random.default_rng(1)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", rng.random((96, 96), dtype=np.float32))
        for role in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{role}_exps.weight", rng.random((8, 96, 97), dtype=np.float32))
    writer.write_header_to_file(stem)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = sorted(scratch.glob("split-*.gguf"))
    assert len(shards) > 1
    for shard in shards:
        with shard.open("rb") as f:
            os.fsync(f.fileno())
    return shards[0]


@pytest.fixture
def cold(model: Path) -> Path:
    assert _expertd("warm", str(model), "--drop").returncode == EXIT_OK
    return model


def _expertd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "expertd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _warm(*arguments: str, code: int = EXIT_OK) -> dict[str, Any]:
    done = _expertd("warm", *arguments, "--json")
    assert done.returncode == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _resident(path: Path) -> int:
    with MappedFiles.map([path]) as mapping:
        pages = residency.resident_pages(mapping.files[0], 0, mapping.files[0].nbytes)
    assert pages is not None
    return pages * libc.PAGE


def test_all_of_a_model_that_fits(cold: Path) -> None:
    first = _warm(str(cold))
    assert first["target_bytes"] == first["resident_bytes"] > 9_000_000
    # Reading the header may have brought in as much as the disk's read-ahead setting.
    assert 0 <= first["read_bytes"] <= first["target_bytes"]
    assert (first["unknown"], first["locked_bytes"], first["skipped"], first["interrupted"]) == (0, 0, [], False)
    assert first["seconds"] > 0
    second = _warm(str(cold), "--all")
    # Others on the machine may cost a page or two in between.
    assert second["read_bytes"] < 0.01 * second["target_bytes"]
    assert second["resident_bytes"] == second["target_bytes"]


def test_only_dense_weights(cold: Path) -> None:
    report = _warm(str(cold), "--dense")
    layout = build_map(read_model(cold)).layout()
    assert report["target_bytes"] == report["resident_bytes"] == layout.dense_nbytes
    assert _resident(cold) < layout.dense_nbytes + (1 << 20)


def test_a_budget_bounds_the_experts_and_says_what_is_left_out(cold: Path) -> None:
    layout = build_map(read_model(cold)).layout()
    report = _warm(str(cold), "--budget", "2MB")
    experts = report["target_bytes"] - layout.dense_nbytes
    assert 2_000_000 - max(layout.expert_sizes) < experts <= 2_000_000
    (skip,) = report["skipped"]
    assert "beyond the budget" in skip["why"]
    assert skip["bytes"] == layout.expert_nbytes - experts


def test_a_profile_is_warmed_hottest_first(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(cold)
    layout = build_map(model).layout()
    profile = Profile.empty("demo", Shape(fingerprint(model), "demo", layout.n_layers, layout.n_experts, 4))
    hot = [3, 70, 200, 511]
    for heat, expert in enumerate(hot, 1):
        profile.counts[expert] = float(heat)
    directory = ProfileDirectory(tmp_path, profile.shape.fingerprint)
    directory.open()
    directory.write(profile)
    directory.close()
    named = _warm(str(cold), "--profile", "demo", "--state", str(tmp_path))
    monkeypatch.setenv("EXPERTD_STATE_DIRECTORY", str(tmp_path))
    report = _warm(str(cold), "--profile", "demo")
    assert (
        named["target_bytes"]
        == report["target_bytes"]
        == layout.dense_nbytes + sum(layout.expert_sizes[e] for e in hot)
    )
    assert report["resident_bytes"] == report["target_bytes"]
    missing = _expertd("warm", str(cold), "--profile", "none")
    assert missing.returncode == EXIT_FAILED
    assert "there is no profile 'none'" in missing.stderr


def test_any_shard_of_a_split_model(split: Path) -> None:
    shards = sorted(split.parent.glob("split-*.gguf"))
    _expertd("warm", str(split), "--drop")
    assert sum(map(_resident, shards)) < 100_000
    report = _warm(str(shards[-1]))
    assert report["resident_bytes"] == report["target_bytes"] == 2 * (3 * 8 * 96 * 97 + 96 * 96) * 4
    dropped = _warm(str(split), "--drop")
    assert dropped["dropped_bytes"] > 0.9 * report["target_bytes"]
    assert dropped["resident_bytes"] == 0


def test_a_warm_up_that_was_cut_short_goes_on(large: ExpertLayout) -> None:
    with MappedFiles.map(large.files) as mapping:
        pager = Pager(large, mapping)
        pager.drop_files()
        plan = plan_warm(large)
        steps = warm_steps(pager, plan, WarmProgress(plan.target_bytes))
        for _ in range(40):
            next(steps)
        steps.close()
        verdict = verify(pager, plan)
        assert verdict.resident_bytes is not None
        assert 0 < verdict.resident_bytes < plan.target_bytes
        assert verdict.missing
        rest = WarmProgress(plan.target_bytes)
        for _ in warm_steps(pager, plan, rest):
            pass
        assert rest.done_bytes == plan.target_bytes
        assert rest.read_bytes <= plan.target_bytes - verdict.resident_bytes + (1 << 20)
        assert verify(pager, plan).missing == ()
        pager.close()


def test_the_hottest_come_first(model: Path) -> None:
    layout = build_map(read_model(model)).layout()
    size = layout.expert_sizes[0]
    plan = plan_warm(layout, dense=False, experts=[70, 3, 511], budget_bytes=2 * size)
    assert plan.experts == (70, 3)
    assert plan.dense == ()
    assert plan.target_bytes == 2 * size
    assert [s.nbytes for s in plan.skipped] == [size]
    assert plan_warm(layout, experts=()).experts == ()


def test_what_the_kernel_skipped_is_read_again(large: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-ahead that does nothing stands for one that met a moment without memory."""
    with MappedFiles.map(large.files) as mapping:
        pager = Pager(large, mapping)
        pager.drop_files()
        monkeypatch.setattr(pager, "fetch_extents", lambda extents: None)
        plan = plan_warm(large, budget_bytes=3 * large.expert_sizes[0])
        for _ in warm_steps(pager, plan, WarmProgress(plan.target_bytes)):
            pass
        assert verify(pager, plan).missing == ()
        pager.close()


def test_what_is_not_there_is_told_by_layer(large: ExpertLayout) -> None:
    with MappedFiles.map(large.files) as mapping:
        pager = Pager(large, mapping)
        pager.drop_files()
        plan = plan_warm(large, experts=[0, 1, 16])
        missing = {skip.what: skip.nbytes for skip in verify(pager, plan).missing}
        size = large.expert_sizes[0]
        assert missing["experts of layer 0"] == pytest.approx(2 * size, abs=4 * libc.PAGE)
        assert missing["experts of layer 1"] == pytest.approx(size, abs=4 * libc.PAGE)
        pager.close()


def test_unknown_residency_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build_map(read_model(model)).layout()
    with MappedFiles.map(layout.files) as mapping:
        pager = Pager(layout, mapping)
        monkeypatch.setattr(warming.residency, "resident_bytes", lambda *_: None)
        plan = plan_warm(layout)
        verdict = verify(pager, plan)
        assert (verdict.resident_bytes, verdict.unknown_bytes, verdict.missing) == (None, plan.target_bytes, ())
        pager.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dense", "--all"], "exclude each other"),
        (["--budget", "much"], "is not a size"),
        (["--budget", "1MB", "--all"], "a budget bounds experts"),
        (["--drop", "--pin"], "takes no other option"),
        (["--profile", "demo", "--dense"], "exclude each other"),
        (["--state", "/tmp"], "name it with --profile"),
    ],
)
def test_contradictions_are_one_line(model: Path, arguments: list[str], said: str) -> None:
    done = _expertd("warm", str(model), *arguments)
    assert done.returncode == EXIT_USAGE
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = _expertd("warm", str(tmp_path / "none.gguf"))
    assert done.returncode == EXIT_FAILED
    assert done.stderr.count("\n") == 1
    assert "none.gguf" in done.stderr


@pytest.fixture
def held(cold: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "expertd", "warm", str(cold), "--hold", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "holding" in line, line
        yield process
        process.kill()


@pytest.mark.root
def test_while_it_holds_another_process_takes_no_major_faults(held: subprocess.Popen[str], cold: Path) -> None:
    layout = build_map(read_model(cold)).layout()
    with MappedFiles.map(layout.files) as mapping:
        f = mapping.files[0]
        os.posix_fadvise(f.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = resource.getrusage(resource.RUSAGE_SELF)
        for e in (*layout.dense, *(x for m in layout.layers for t in m.tensors for x in _whole(t, m.n_experts))):
            ctypes.string_at(f.base + e.offset, e.nbytes)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_majflt == before.ru_majflt
        assert after.ru_inblock == before.ru_inblock
        assert after.ru_minflt > before.ru_minflt
    held.send_signal(signal.SIGTERM)
    out, _ = held.communicate(timeout=10)
    report = json.loads(out)
    assert held.returncode == EXIT_OK
    assert report["locked_bytes"] == report["target_bytes"]


def _whole(tensor: Any, n_experts: int) -> list[Extent]:
    return [tensor.extent(i) for i in range(n_experts)]


@pytest.mark.root
def test_a_file_that_is_replaced_while_it_is_held_is_noticed(held: subprocess.Popen[str], cold: Path) -> None:
    other = cold.with_name("other.gguf")
    shutil.copyfile(cold, other)
    saved = cold.with_name("saved.gguf")
    cold.rename(saved)
    try:
        other.rename(cold)
        _, errors = held.communicate(timeout=10)
        assert held.returncode == EXIT_FAILED
        assert "was replaced by another file" in errors
    finally:
        saved.rename(cold)
