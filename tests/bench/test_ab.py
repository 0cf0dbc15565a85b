"""The benchmarks at a small size, through the command line: same output, and the mechanism has fired."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from expertd.bench import ab
from expertd.bench.inflate import plan, write
from expertd.bench.readahead import read_ahead
from expertd.bench.spec import Arm, Kind, Prompt
from expertd.cli.bench import command
from expertd.errors import BenchError, ExpertdError, UsageError


def bench(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    if isinstance(result.exception, ExpertdError):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _check(document: dict[str, Any]) -> None:
    plain, steered = document["arms"]
    assert (plain["name"], steered["name"]) == ("plain", "steered")
    assert document["same_output"] is True
    assert document["same_logits"] is True
    assert steered["choice"].startswith("steering is on")
    assert plain["hit_ratio"] is None
    assert 0 < steered["hit_ratio"] <= 1
    assert steered["splits_per_token"] > 0
    assert steered["resident_bytes"] <= steered["budget_bytes"]
    assert document["decode_ratio"] > 0


@pytest.mark.cgroup
@pytest.mark.slow
def test_inflated_model_in_little_memory(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    document = bench(
        "ab", "--inflate", "400MB", "--memory", "260MiB", "--runs", 1, "--tokens", 24, "--prompt", "def main():",
        "--dir", tmp_path, "--json", "--report", page,
    )  # fmt: skip
    _check(document)
    plain, steered = document["arms"]
    assert steered["hit_ratio"] < 1, "the experts do not all fit"
    assert steered["budget_bytes"] < 390e6, "the budget is what the cgroup leaves"
    assert steered["read_bytes_per_token"] > 0
    assert steered["load_read_bytes"] < plain["load_read_bytes"] / 4
    for arm in (plain, steered):
        assert arm["peak_bytes"] is None or arm["peak_bytes"] <= 260 << 20
    assert "<svg" in page.read_text()
    assert not list(tmp_path.glob("*.gguf")), "made files go, unless --keep"


@pytest.mark.cgroup
@pytest.mark.slow
def test_geometry_with_forced_routes(tmp_path: Path, write_trace: Any) -> None:
    # Eight experts a layer stay hot for long, then others: the steered arm must follow.
    rows = []
    for step in range(60):
        for layer in range(4):
            base = (step // 20) * 8
            rows.append((int(step >= 12), step, layer, [(base + step * 3 + layer + i) % 24 for i in range(4)]))
    trace = write_trace(rows)
    document = bench(
        "geometry", "qwen3-30b-a3b", "--layers", 4, "--experts", 32, "--vocab", 1024, "--routes", trace,
        "--memory", "320MiB", "--runs", 1, "--tokens", 40, "--dir", tmp_path, "--json",
    )  # fmt: skip
    assert document["model"]["experts_used"] == 4, "the trace says how many experts a token takes"
    assert document["prompts"][0]["tokens"] == 12
    _check(document)


def test_without_a_cgroup_and_with_two_prompts(tmp_path: Path, demo_model: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"topic": t, "text": f"{t} is"}) for t in ("snow", "rain", "fog")))
    document = bench(
        "ab", demo_model, "--runs", 2, "--tokens", 8, "--prompts", prompts, "--topic", "snow", "--topic", "fog",
        "--arm", "plain", "--arm", "steered", "--json",
    )  # fmt: skip
    _check(document)
    assert document["memory_bytes"] is None
    assert [p["topic"] for p in document["prompts"]] == ["snow", "fog"]
    for arm in document["arms"]:
        assert len(arm["runs"]) == 2
        assert [len(p["output"]) for p in arm["runs"][0]["prompts"]] == [8, 8]
    assert document["command"]
    assert document["machine"]["cores"] >= 1


def test_auto_says_what_it_chose(demo_model: Path) -> None:
    document = bench("ab", demo_model, "--runs", 1, "--tokens", 4, "--prompt", "Once", "--arm", "plain",
                     "--arm", "repacked", "--arm", "auto", "--json")  # fmt: skip
    auto = document["arms"][2]
    assert auto["choice"].startswith("steering is off"), "10 MB fit into any machine's memory"
    assert auto["runs"][0]["repacked"] is True
    assert document["same_output"] is True


def test_an_arm_with_a_fixed_budget_and_policy(demo_model: Path) -> None:
    document = bench("ab", demo_model, "--runs", 1, "--tokens", 12, "--prompt", "The sea", "--arm", "plain",
                     "--arm", "steered@3MiB/lru", "--json")  # fmt: skip
    steered = document["arms"][1]
    assert steered["budget_bytes"] == 3 << 20
    assert steered["policy"] == "lru"
    assert 0 < steered["hit_ratio"] < 1
    assert document["same_logits"] is True


def test_jobs_that_make_no_sense(demo_model: Path) -> None:
    arm, prompt = Arm("plain", Kind.PLAIN), Prompt("", "x")
    for job in (
        ab.Job(demo_model, (arm, arm), (prompt,)),
        ab.Job(demo_model, (), (prompt,)),
        ab.Job(demo_model, (arm,), ()),
        ab.Job(demo_model, (arm,), (prompt,), runs=0),
        ab.Job(demo_model, (arm,), (prompt,), n_tokens=1),
        ab.Job(demo_model, (arm,), (prompt,), warm=True, memory_bytes=1 << 30),
    ):
        with pytest.raises(UsageError):
            ab.check(job)


def test_read_ahead_is_put_back(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    setting = tmp_path / f"sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("128\n")
    with contextlib.suppress(RuntimeError), read_ahead(tmp_path, 8192, tmp_path):
        assert setting.read_text() == "8192"
        raise RuntimeError
    assert setting.read_text() == "128"
    setting.unlink()
    with pytest.raises(BenchError, match="shows no read_ahead_kb"), read_ahead(tmp_path, 64, tmp_path):
        pass


@pytest.mark.cgroup
def test_a_model_that_stays_cached_is_noted(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    write(plan(60 << 20), model)
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        assert sum(held[:: mmap.PAGESIZE]) >= 0

        class Quiet:
            def begins(self, arm: Arm, number: int) -> None: ...
            def line(self, line: dict[str, Any]) -> None: ...
            def ends(self, arm: Arm, run: object) -> None: ...

        job = ab.Job(model, (Arm("plain", Kind.PLAIN),), (Prompt("", "a"),), n_tokens=2, runs=1)
        comparison = ab.run(job, Quiet())
    assert any("stayed in the page cache" in note for note in comparison.arms[0].runs[0].notes)


def test_warm_runs_hardly_read(demo_model: Path) -> None:
    for _ in range(4):  # A kernel that reclaims idle pages (DAMON) may take some of a model just warmed.
        document = bench("ab", demo_model, "--warm", "--runs", 1, "--tokens", 60, "--prompt", "A", "--json")
        read = [arm["read_bytes_per_token"] * 59 + arm["prompt_read_bytes"] for arm in document["arms"]]
        hits = document["arms"][1]["hit_ratio"]
        if hits == 1.0 and max(read) < 1 << 20:  # not zero: Python may still read a module of its own
            return
    raise AssertionError(f"bytes read: {read}, hit ratio {hits}: what is resident is adopted")


@pytest.mark.cgroup
def test_a_terminated_benchmark_leaves_nothing_behind(tmp_path: Path) -> None:
    code = "import sys; from expertd.cli import run; sys.exit(run(sys.argv[1:]))"
    arguments = ["bench", "ab", "--inflate", "60MB", "--dir", str(tmp_path), "--tokens", "900", "--memory", "100MiB"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("run 1/"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
