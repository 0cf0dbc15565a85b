"""Misses and bytes read of every policy on recorded traces, to the byte: a change of behaviour is a changed number.

`python tests/cache/test_golden.py` writes the numbers anew (those of ../shared/traces too, where that is there).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertd.cache.belady import misses
from expertd.cache.expert_cache import ExpertCache
from expertd.cache.policy import POLICIES
from expertd.cache.trace import Trace
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase

DATA = Path(__file__).with_name("data")
GOLDEN = DATA / "golden.json"
PERCENTS = (5, 10, 15, 20, 25, 35, 50, 75)
SHARED = ("qwen3-30b-a3b", "gpt-oss-120b")
Figures = dict[str, list[list[int]]]
"""[misses, bytes read] for each budget, by policy."""

LEAST = {  # what a plain decayed score with a half-life of 16 tokens reaches, in tenths of a percent
    "qwen3-30b-a3b": {10: 546, 15: 671, 25: 834, 35: 921, 50: 967},
    "gpt-oss-120b": {10: 601, 15: 704, 25: 811, 35: 855, 50: 891},
}


def run(trace: Trace, policy: str, percent: int) -> list[int]:
    sizes = trace.sizes()
    budget = sum(sizes) * percent // 100
    if policy == "belady":
        wanted = [sorted({r.layer * trace.n_experts + i for i in r.ids}) for r in trace.routes]
        missed = [e for route in misses(wanted, sizes, budget) for e in route]
        return [len(missed), sum(sizes[e] for e in missed)]
    cache = ExpertCache(sizes, trace.n_experts, budget, policy, n_used=trace.k)
    for r in trace.routes:
        cache.route(r.layer, r.ids, r.phase, r.n_tokens)
    return [cache.counters.misses, cache.counters.request_bytes - cache.counters.hit_bytes]


def figures(trace: Trace, policies: tuple[str, ...]) -> Figures:
    return {policy: [run(trace, policy, percent) for percent in PERCENTS] for policy in policies}


OWN = (*POLICIES, "auto", "belady")
ABROAD = ("lru", "auto")


@pytest.mark.parametrize("name", ["chat", "code", "mixed"])
@pytest.mark.parametrize("policy", OWN)
def test_figures_on_the_built_in_models_traces(name: str, policy: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name][policy]
    assert figures(load_trace(DATA / f"{name}.trace"), (policy,))[policy] == golden


@pytest.mark.traces
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("policy", ABROAD)
def test_figures_on_large_models_traces(shared_traces: Path, name: str, policy: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name][policy]
    assert figures(load_trace(shared_traces / f"{name}.route.csv"), (policy,))[policy] == golden


@pytest.mark.traces
@pytest.mark.parametrize("name", SHARED)
def test_the_default_decodes_with_more_hits_than_a_decayed_score_and_lru(shared_traces: Path, name: str) -> None:
    """Budgets are parts of the number of experts, after the prompt, as those figures were made."""
    trace = load_trace(shared_traces / f"{name}.route.csv")
    n = trace.n_layers * trace.n_experts

    def decode_hits(policy: str, percent: int) -> float:
        cache = ExpertCache([1] * n, trace.n_experts, n * percent // 100, policy, n_used=trace.k)
        hits = requests = 0
        for r in trace.routes:
            found = cache.route(r.layer, r.ids, r.phase, r.n_tokens).hits
            if r.phase == Phase.DECODE:
                hits += found
                requests += len(r.ids)
        return hits / requests

    for percent, least in LEAST[name].items():
        ratio = decode_hits("auto", percent)
        assert round(1000 * ratio) >= least
        assert ratio >= decode_hits("lru", percent)


def test_auto_loses_to_no_policy_by_more_than_a_point() -> None:
    for name in ("chat", "code", "mixed"):
        trace = load_trace(DATA / f"{name}.trace")
        golden = json.loads(GOLDEN.read_text())[name]
        requests = sum(len(set(r.ids)) for r in trace.routes)
        for at in range(len(PERCENTS)):
            best = min(golden[policy][at][0] for policy in POLICIES)
            assert golden["auto"][at][0] <= best + requests // 100


@pytest.mark.traces
@pytest.mark.parametrize("name", SHARED)
def test_auto_loses_to_no_policy_by_more_than_a_point_on_large_models(shared_traces: Path, name: str) -> None:
    trace = load_trace(shared_traces / f"{name}.route.csv")
    golden = json.loads(GOLDEN.read_text())[name]["auto"]
    requests = sum(len(set(r.ids)) for r in trace.routes)
    for percent in (10, 50):
        best = min(run(trace, policy, percent)[0] for policy in POLICIES)
        assert golden[PERCENTS.index(percent)][0] <= best + requests // 100


def _write() -> None:
    golden = {name: figures(load_trace(DATA / f"{name}.trace"), OWN) for name in ("chat", "code", "mixed")}
    shared = Path(__file__).resolve().parents[3] / "shared" / "traces"
    for name in SHARED:
        if shared.is_dir():
            golden[name] = figures(load_trace(shared / f"{name}.route.csv"), ABROAD)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    _write()
