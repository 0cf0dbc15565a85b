"""Small models, traces and runs for the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from expertd.bench.geometry import Geometry
from expertd.bench.meter import Reading
from expertd.bench.spec import Cache, PromptRun, Run


@pytest.fixture
def small_geometry() -> Geometry:
    """3 layers x 16 experts, 4 used, some 2 MB."""
    return Geometry("small", "qwen3moe", 3, 16, 4, 256, 96, 4, 2, 64, 1024)


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Writes a route CSV: `rows` are (phase, step, layer, experts); returns its path."""

    def write(rows: list[tuple[int, int, int, list[int]]]) -> Path:
        lines = ["# route_trace v1", "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
        for phase, step, layer, experts in rows:
            lines += [f"0,{phase},{step},{layer},{slot},{e},0.5,0,1000" for slot, e in enumerate(experts)]
        path = tmp_path / "trace.route.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """A run with one prompt that decodes a token every `gap` seconds."""

    def make(
        arm: str = "plain",
        *,
        gap: float = 0.5,
        output: tuple[int, ...] = (1, 2, 3),
        finished: bool = True,
        stalled: float = 0.0,
        read: int = 0,
        cache: Cache | None = None,
        repacked: bool = False,
        logits: str = "same",
    ) -> Run:
        gaps = (gap,) * (len(output) - 1)
        decode = Reading(sum(gaps) + stalled, 0.1, 4, read)
        prompt = PromptRun("", 10, Reading(2.0, 1.0, 7, 500), decode, gaps, output, logits)
        load = Reading(1.0, 0.5, 3, 1000)
        return Run(arm, finished, load, load, (prompt,), repacked, cache, wall_seconds=20.0)

    return make
