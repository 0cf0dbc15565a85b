"""Whether pinning or warming can help, from how routing is spread and whether that lasts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from expertd.cache.skew import SkewReport, measure
from expertd.cache.trace import LayerRoute
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase

N = 64


def _measured(weights_of_halves: tuple[list[float], list[float]], tokens: int = 400) -> SkewReport:
    """Two layers, four experts a token, drawn by weights that may change half way."""
    chance = random.Random(7)
    routes = []
    for step in range(tokens):
        weights = weights_of_halves[2 * step // tokens]
        for layer in (0, 3):
            ids: set[int] = set()
            while len(ids) < 4:
                ids.add(chance.choices(range(N), weights)[0])
            routes.append(LayerRoute(0, step, layer, Phase.DECODE, tuple(ids)))
    return measure(routes, N)


EVEN = [1.0] * N
ZIPF = [1.0 / (i + 1) for i in range(N)]


def test_even_routing_cannot_be_helped() -> None:
    report = _measured((EVEN, EVEN))
    assert not report.helps
    assert report.verdict.startswith("routing is even")
    assert report.verdict.endswith("pinning or warming cannot help")
    assert all(abs(a - b) < 0.06 for a, b in zip(report.overall.lasting, (0.1, 0.25, 0.5), strict=True))


def test_lasting_skew_can() -> None:
    report = _measured((ZIPF, ZIPF))
    assert report.helps
    assert "it lasts" in report.verdict
    assert report.overall.taken[1] > 0.6
    assert report.overall.lasting[1] > 0.6


def test_skew_that_moves_cannot() -> None:
    report = _measured(([1.0] * 8 + [0.001] * 56, [0.001] * 56 + [1.0] * 8))
    assert report.overall.taken[1] > 0.9
    assert report.overall.lasting[1] < 0.3
    assert not report.helps
    assert report.verdict.startswith("what is hot does not last")


def test_few_tokens_say_nothing() -> None:
    report = _measured((ZIPF, ZIPF), tokens=10)
    assert not report.helps
    assert "too few" in report.verdict


def test_layers_and_batches_add_up() -> None:
    batch = [LayerRoute(0, 0, 1, Phase.PREFILL, (0, 1, 0, 2, 0, 3, 0, 1), 4)]
    single = [LayerRoute(0, step, 1, Phase.PREFILL, batch[0].ids[2 * step : 2 * step + 2]) for step in range(4)]
    assert measure(batch, 8) == measure(single, 8)
    found = measure(batch, 8)
    assert found.tokens == 4
    assert [s.layer for s in found.layers] == [1]
    assert found.layers[0].requests == found.overall.requests == 8
    assert found.layers[0].taken == (4 / 8, 6 / 8, 1.0)
    assert found.layers[0].lasting == (2 / 4, 3 / 4, 1.0)


@pytest.mark.traces
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-120b"])
def test_real_routing_is_skewed_and_it_lasts(shared_traces: Path, name: str) -> None:
    trace = load_trace(shared_traces / f"{name}.route.csv")
    report = measure(trace.selected(Phase.DECODE), trace.n_experts)
    assert report.helps
    assert len(report.layers) == trace.n_layers
