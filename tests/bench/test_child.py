"""One run in a process of its own: what comes back when it ends, is late, dies or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertd.bench.cgroup import memory_group
from expertd.bench.child import run_child
from expertd.bench.inflate import plan, write
from expertd.bench.results import METRICS
from expertd.bench.spec import Arm, Kind, Prompt, RunSpec
from expertd.errors import BenchError

PLAIN = Arm("plain", Kind.PLAIN)


def _spec(model: Path, **changes: Any) -> RunSpec:
    values: dict[str, Any] = {
        "arm": PLAIN, "model": str(model), "prompts": (Prompt("chat", "What is a router?"),), "n_tokens": 6,
        "n_ctx": 256, "threads": 2, **changes,
    }  # fmt: skip
    return RunSpec(**values)


def test_a_whole_run(demo_model: Path) -> None:
    lines: list[dict[str, Any]] = []
    run = run_child(_spec(demo_model), None, 120, lines.append)
    assert run.finished
    assert [line["at"] for line in lines] == ["start", "ready", "prompt", "first", *["token"] * 5, "answer", "run"]
    answer = run.prompts[0]
    assert len(answer.output) == 6
    assert len(answer.token_seconds) == 5
    assert sum(answer.token_seconds) <= answer.decode_cost.seconds
    assert run.ready_cost.seconds >= run.load_cost.seconds > 0
    assert run.wall_seconds > run.ready_cost.seconds
    assert answer.text


def test_a_late_run_keeps_what_it_had(demo_model: Path) -> None:
    # The context holds more tokens than 4 s suffice for, with one thread and a large step between them.
    seen: list[str] = []
    run = run_child(_spec(demo_model, n_tokens=100_000, n_ctx=200_000), None, 4.0, lambda line: seen.append(line["at"]))
    assert not run.finished
    assert "run" not in seen
    assert run.wall_seconds < 30
    if "token" in seen:
        speed = METRICS["tokens_per_second"](run)
        assert speed is not None
        assert speed > 0
        assert run.prompts[0].output


def test_an_arm_that_refuses_says_why(demo_model: Path) -> None:
    with pytest.raises(BenchError, match="do not fit into 256") as caught:
        run_child(_spec(demo_model, n_tokens=300), None, 120, lambda line: None)
    assert "--ctx" in caught.value.hint
    with pytest.raises(BenchError, match=r"arm steered: .*below the"):
        run_child(_spec(demo_model, arm=Arm("steered", Kind.STEERED, budget=1000)), None, 120, lambda line: None)


def test_a_model_that_llama_cpp_does_not_load(tmp_path: Path, demo_model: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model.read_bytes()[:-100_000])
    with pytest.raises(BenchError, match="arm plain"):
        run_child(_spec(broken), None, 120, lambda line: None)


@pytest.mark.cgroup
def test_an_arm_that_is_killed_for_memory(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    write(plan(60 << 20), model)
    with memory_group(24 << 20) as group, pytest.raises(BenchError, match="was killed for memory"):
        run_child(_spec(model), group, 120, lambda line: None)
