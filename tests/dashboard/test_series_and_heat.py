"""What the dashboard draws from: the ring of points, the memory by kind, the map's bytes, single experts."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertd.cache.expert_cache import ExpertCache
from expertd.cli.screen import binned, colour, sparkline
from expertd.runtime.heat import STATES, Heat
from expertd.runtime.recency import FRESH_TOKENS, Recency
from expertd.telemetry.history import COLUMNS, POINTS, History, memory
from expertd.telemetry.readings import Readings
from expertd.telemetry.snapshot import CacheFacts, HistogramData, ModelFacts, PagerFacts, RequestFacts, Snapshot
from expertd.telemetry.watch import Sample
from expertd.types import ExpertLayout, ExpertTensor, MoeLayer

N_LAYERS, N_EXPERTS, SIZE = 3, 8, 100
LEARNT = 16
"""Tokens after which every policy has counted what it saw."""


class Looked:
    """As much of a steering as the picture looks at, around a real cache."""

    def __init__(self, budget: int) -> None:
        tensors = [ExpertTensor("up", f"blk.{layer}.up", 0, layer * 800, SIZE) for layer in range(N_LAYERS)]
        layers = tuple(MoeLayer(layer, N_EXPERTS, (tensor,)) for layer, tensor in enumerate(tensors))
        self.layout = ExpertLayout((Path("x"),), (10_000,), N_LAYERS, N_EXPERTS, 2, layers, ())
        self.cache = ExpertCache(self.layout.expert_sizes, N_EXPERTS, budget)
        self.recency = Recency(N_LAYERS * N_EXPERTS)

    def read(self, look: Callable[[ExpertCache], Any]) -> Any:
        return look(self.cache)

    def token(self, *ids: int) -> None:
        self.recency.begin_token()
        for layer in range(N_LAYERS):
            decision = self.cache.route(layer, ids)
            self.recency.note(layer * N_EXPERTS, ids, decision.fetch)


@pytest.fixture
def looked() -> Looked:
    return Looked(budget=18 * SIZE)


def states(heat: Heat) -> list[str]:
    return [STATES[cell >> 6] for cell in heat.cells().body]


def test_states_and_heat_by_rank(looked: Looked) -> None:
    heat: Any = Heat(looked)  # type: ignore[arg-type]
    assert heat.cells().body == bytes(N_LAYERS * N_EXPERTS)
    for ids in ((0, 1), (0, 2), (0, 3)):
        for _ in range(LEARNT):
            looked.token(*ids)
    looked.token(0, 4)
    looked.cache.pin([1])
    heat = Heat(looked)  # type: ignore[arg-type]
    assert states(heat)[:N_EXPERTS] == ["resident", "pinned", "resident", "resident", "missed", *["absent"] * 3]
    levels = [cell & 63 for cell in heat.cells().body[:N_EXPERTS]]
    assert levels[0] > levels[3] > levels[2] > levels[1] > 0
    assert levels[4] > 0 == levels[5]


def test_a_miss_fades_after_some_tokens(looked: Looked) -> None:
    looked.token(5, 6)
    assert states(Heat(looked))[5] == "missed"  # type: ignore[arg-type]
    for _ in range(FRESH_TOKENS):
        looked.token(5, 6)
    assert "missed" not in states(Heat(looked))  # type: ignore[arg-type]


def test_equals_are_equally_hot_in_every_layer(looked: Looked) -> None:
    for _ in range(LEARNT):
        looked.token(0, 1)
    levels = {cell & 63 for cell in Heat(looked).cells().body if cell & 63}  # type: ignore[arg-type]
    assert len(levels) == 1


def test_the_version_tells_of_changes_alone(looked: Looked) -> None:
    heat = Heat(looked)  # type: ignore[arg-type]
    looked.recency.last_miss = 0.0
    version = heat.version()
    assert heat.version() == version
    assert heat.cells() is heat.cells()
    looked.token(0, 1)
    assert heat.version() != version


def test_single_experts(looked: Looked) -> None:
    for _ in range(LEARNT):
        looked.token(0, 1)
    looked.token(0, 2)
    heat = Heat(looked)  # type: ignore[arg-type]
    (row,) = heat.experts(layer=1, expert=0)["experts"]
    assert row["rank"] == 1
    assert row["bytes"] == SIZE
    assert row["state"] == "resident"
    assert row["used_seconds_ago"] is not None
    (unused,) = heat.experts(layer=1, expert=7)["experts"]
    assert (unused["rank"], unused["used_seconds_ago"], unused["state"]) == (None, None, "absent")
    everything = heat.experts(limit=1000)
    assert len(everything["experts"]) == everything["total"] == N_LAYERS * N_EXPERTS
    assert [e["score"] for e in everything["experts"]] == sorted(
        (e["score"] for e in everything["experts"]), reverse=True
    )
    assert heat.experts(layer=9)["experts"] == []


def sample(at: float, tokens: int = 0, **kernel: Any) -> Sample:
    """One moment of a daemon that decodes a token in a tenth of a second."""
    requests = RequestFacts(inter_token=HistogramData(bounds=(1.0,), counts=(tokens, 0), total=tokens / 10))
    cache = CacheFacts(
        requests=10 * tokens, hits=8 * tokens, capacity_nbytes=500, resident_nbytes=400, pinned_nbytes=100
    )
    model = ModelFacts("m", "a", "f", 1, 1, 1, 1000, 50, 10)
    daemon = Snapshot(
        steering=True, model=model, kv_nbytes=30, cache=cache, requests=requests,
        pager=PagerFacts(fetch_nbytes=100 * tokens, wait_seconds=0.01 * tokens),
    )  # fmt: skip
    return Sample(
        at, daemon, Readings(**{"limit_nbytes": 2000, "available_nbytes": 900, "locked_nbytes": 150, **kernel})
    )


def test_a_point_is_a_difference() -> None:
    history = History()
    history.add(sample(10.0, 100, read_nbytes=1000, major_faults=5, stall_some_seconds=1.0))
    history.add(sample(12.0, 120, read_nbytes=5000, major_faults=9, stall_some_seconds=1.5))
    document = history.document()
    (point,) = document["points"]
    found = dict(zip(COLUMNS, point, strict=True))
    assert found["tokens_per_second"] == pytest.approx(10)
    assert found["hit_ratio"] == pytest.approx(0.8)
    assert found["prompt_hit_ratio"] is None
    assert found["disk_read_bytes_per_second"] == 2000
    assert found["fetch_bytes_per_second"] == 1000
    assert found["major_faults_per_second"] == 2
    assert found["wait_share"] == pytest.approx(0.1)
    assert found["stall_share"] == pytest.approx(0.25)


def test_idle_points_have_no_ratio() -> None:
    history = History()
    for at in (10.0, 12.0):
        history.add(sample(at, 100))
    found = dict(zip(COLUMNS, history.document()["points"][0], strict=True))
    assert found["tokens_per_second"] is None
    assert found["hit_ratio"] is None
    assert found["stall_share"] is None


def test_only_new_points_are_sent_and_old_ones_are_dropped() -> None:
    history = History()
    for i in range(6):
        history.add(sample(2.0 * i, i))
    assert (history.document()["last"], len(history.document()["points"])) == (5, 5)
    assert len(history.document(since=3)["points"]) == 2
    assert history.document(since=5)["points"] == []
    assert len(history.document(since=99)["points"]) == 5, "a number of another life"
    for i in range(6, POINTS + 20):
        history.add(sample(2.0 * i, i))
    assert len(history.document()["points"]) == POINTS
    assert len(history.document(since=0)["points"]) == POINTS


def test_the_kinds_of_memory_add_up() -> None:
    kinds = memory(sample(0.0))
    assert kinds["dense_locked"] == 50
    assert kinds["pinned"] == 100
    assert kinds["resident"] == 300
    assert kinds["free"] == 600, "what can be taken back without touching experts"
    parts = ("dense_locked", "dense", "pinned", "resident", "kv", "other", "free")
    assert sum(kinds[part] for part in parts) == kinds["limit"] == 2000


def test_the_endpoints(daemon: Any, waiting: Callable[..., Any]) -> None:
    series = waiting(lambda: (s := daemon.get("/expertd/series"))["points"] and s, "a point")
    assert series["columns"][0] == "at"
    assert len(series["points"][0]) == len(series["columns"])
    assert series["memory"]["kv"] > 0
    assert "layers" not in series["cache"]
    assert len(daemon.get(f"/expertd/series?since={series['last']}")["points"]) <= 1
    assert daemon.get("/expertd/experts?limit=3")["total"] == 512
    with pytest.raises(urllib.error.HTTPError) as refused:
        daemon.get("/expertd/experts?layer=x")
    assert refused.value.code == 400


def test_the_map_is_not_sent_twice(daemon: Any, waiting: Callable[..., Any]) -> None:
    def ask(tag: str | None) -> Any:
        request = urllib.request.Request(
            f"{daemon.url}/expertd/heatmap", headers={"accept": "application/octet-stream"}
        )
        if tag:
            request.add_header("if-none-match", tag)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return SimpleNamespace(status=answer.status, headers=answer.headers, body=answer.read())
        except urllib.error.HTTPError as error:
            return SimpleNamespace(status=error.code, headers=error.headers, body=error.read())

    first = ask(None)
    assert len(first.body) == 512
    assert first.headers["x-expertd-layers"] == "0,1,2,3,4,5,6,7"
    assert waiting(lambda: ask(first.headers["etag"]).status == 304, "no change")
    with daemon.generating():
        waiting(lambda: ask(first.headers["etag"]).status == 200, "a change")


def test_a_small_terminal_shows_the_hottest_neighbour() -> None:
    cells = bytes([0, 10, 64 | 5, 0] * 2)
    assert binned(cells, 2, 4, 1, 1) == [[0, 10, 69, 0], [0, 10, 69, 0]]
    assert binned(cells, 2, 4, 2, 2) == [[10, 69]]
    assert colour(0) == "#1c212a"
    assert colour(64 | 63) == "#ffe9a3"
    assert sparkline([0, None, 5, 10]) == "▁ ▅█"
    assert sparkline([]) == ""
