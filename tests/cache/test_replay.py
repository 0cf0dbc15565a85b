"""Recorded traces as data, and what policies would have read for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.cache.replay import check_policy, policy_names, replay
from expertd.cache.trace import LayerRoute, Trace, make_trace, parse_columns
from expertd.errors import StateError, UsageError
from expertd.runtime.trace_file import TraceWriter, csv_lines, pack, read_header, read_routes
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
CHAT = Path(__file__).parent / "data" / "chat.trace"


def _decoded(tokens: Sequence[Sequence[int]], *, nbytes: int = 10, n_experts: int = 8) -> Trace:
    """A trace of one layer."""
    routes = [LayerRoute(0, step, 0, Phase.DECODE, tuple(ids)) for step, ids in enumerate(tokens)]
    return make_trace("made", routes, n_experts=n_experts, expert_bytes={0: nbytes})


def test_columns_become_batches_and_tokens() -> None:
    lines = ["# model=/models/m.gguf n_layer=3 n_expert=8 n_expert_used=2", "# layer=0 expert_bytes=100 dense_bytes=7",
             "# layer=2 expert_bytes=300 dense_bytes=7", COLUMNS]  # fmt: skip
    for layer in (0, 1):
        lines += [f"0,0,{step},{layer},{slot},{step + slot},0.5,0,200" for step in (0, 1) for slot in (0, 1)]
    lines += ["0,1,2,0,0,5,1,0,100", "0,1,2,0,1,6,1,0,100", "", "0,1,3,0,0,5,1,0,0", "0,1,3,0,1,7,1,0,100"]
    trace = parse_columns(lines, "t")
    assert (trace.model, trace.n_layers, trace.n_experts, trace.k) == ("m.gguf", 3, 8, 2)
    assert trace.expert_bytes == {0: 100, 1: 200, 2: 300}
    assert trace.routes == (
        LayerRoute(0, 0, 0, Phase.PREFILL, (0, 1, 1, 2), 2),
        LayerRoute(0, 0, 1, Phase.PREFILL, (0, 1, 1, 2), 2),
        LayerRoute(0, 2, 0, Phase.DECODE, (5, 6)),
        LayerRoute(0, 3, 0, Phase.DECODE, (5, 7)),
    )
    assert list(trace.routes[0].tokens()) == [(0, (0, 1)), (1, (1, 2))]
    assert (trace.n_tokens(Phase.PREFILL), trace.n_tokens(Phase.DECODE)) == (2, 2)
    assert sum(trace.sizes()) == 8 * 600


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no routes"),
        (["0,1,0,0,0,x,1,0,1"], "line 2 is no route"),
        (["0,1,0,0"], "line 2 is no route"),
        (["0,2,0,0,0,1,1,0,1"], "line 2 is no route"),
        (["0,1,0,-1,0,1,1,0,1"], "line 2 is no route"),
        (["0,1,0,99999999999,0,1,1,0,1"], "line 2 is no route"),
        (["0,1,0,65535,0,65535,1,0,1"], "more than any model has"),
        (["# n_expert=4", "0,1,0,0,0,4,1,0,1"], "names expert 4 of a model with 4"),
    ],
)
def test_rows_that_are_none(rows: list[str], words: str) -> None:
    with pytest.raises(StateError, match=words):
        parse_columns([COLUMNS, *rows], "t")


def test_what_is_no_trace(tmp_path: Path) -> None:
    for text in ("", "a,b\n1,2\n"):
        with pytest.raises(StateError, match="is no trace"):
            parse_columns(text.splitlines(), "t")
    path = tmp_path / "x"
    with pytest.raises(StateError, match="cannot read the trace"):
        load_trace(path)
    path.write_bytes(b"GGUF\xff\xfe\x00\x80")
    with pytest.raises(StateError, match="neither expertd's nor text"):
        load_trace(path)
    TraceWriter(path, {"expert_bytes": 3}).close()
    with pytest.raises(StateError, match="its header is torn"):
        load_trace(path)


def test_sizes_must_be_known() -> None:
    with pytest.raises(StateError, match="size of layer 0's experts"):
        parse_columns(["turn,phase,step,layer,expert", "0,1,0,0,3"], "t").sizes()


def test_both_forms_are_one_trace(tmp_path: Path) -> None:
    header = {"model": "m", "layers": 2, "experts": 8, "experts_used": 2, "expert_bytes": {"0": 10, "1": 20}}
    binary, columns = tmp_path / "x.trace", tmp_path / "x.csv"
    writer = TraceWriter(binary, header)
    writer.block(pack(0, 0, 0, [1, 2, 3, 4]) + pack(0, 1, 0, [1, 2, 3, 4]))
    writer.block(pack(2, 0, 1, [5, 6]) + pack(2, 1, 1, [7, 6]))
    writer.close()
    with binary.open("rb") as file:
        columns.write_text("\n".join(csv_lines(read_header(file, "x"), read_routes(file))) + "\n")
    a, b = load_trace(binary), load_trace(columns)
    assert a.routes == b.routes
    assert (a.n_layers, a.n_experts, a.k, a.sizes()) == (b.n_layers, b.n_experts, b.k, b.sizes())
    binary.write_bytes(binary.read_bytes()[:-1])
    assert load_trace(binary).routes == a.routes[:2]


def test_a_known_sequence() -> None:
    """Three experts in turn in room for two: LRU never hits, hindsight does."""
    trace = _decoded([[0], [1], [2]] * 4)
    lru, roof = replay(trace, "lru", 20), replay(trace, "belady", 20)
    assert (lru.requests, lru.hits, lru.bytes_read, lru.hit_ratio) == (12, 0, 120, 0.0)
    assert (roof.requests, roof.hits, roof.bytes_read) == (12, 5, 70)
    assert roof.layer_requests == (12,)
    assert roof.layer_hits == (5,)


def test_the_prompt_comes_first_and_is_counted_on_request() -> None:
    routes = [LayerRoute(0, 0, 0, Phase.PREFILL, (0, 1, 1, 2), 2), LayerRoute(0, 2, 0, Phase.DECODE, (1, 3))]
    trace = make_trace("made", routes, n_experts=8, expert_bytes={0: 10})
    for policy in policy_names():
        counted = [replay(trace, policy, 80, phase) for phase in (Phase.PREFILL, Phase.DECODE, None)]
        assert [(r.requests, r.hits, r.bytes_read) for r in counted] == [(3, 0, 30), (2, 1, 10), (5, 1, 40)]


def test_names() -> None:
    for name in policy_names():
        check_policy(name)
    with pytest.raises(UsageError, match="no policy 'clairvoyant'") as error:
        check_policy("clairvoyant")
    assert "belady" in error.value.hint


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=60),
    st.integers(2, 9),
)
def test_nobody_passes_the_roof(tokens: list[list[int]], room: int) -> None:
    trace = _decoded(tokens)
    roof = replay(trace, "belady", 10 * room)
    for policy in policy_names():
        row = replay(trace, policy, 10 * room)
        assert row == replay(trace, policy, 10 * room)
        assert row.requests == 2 * len(tokens)
        assert row.hits <= roof.hits
        assert row.bytes_read == 10 * (row.requests - row.hits)


def test_a_recorded_trace_of_the_built_in_model() -> None:
    trace = load_trace(CHAT)
    assert (trace.n_layers, trace.n_experts, trace.k) == (8, 64, 4)
    total = sum(trace.sizes())
    for part in (10, 50):
        rows = {p: replay(trace, p, total * part // 100, Phase.DECODE) for p in policy_names()}
        assert len({r.requests for r in rows.values()}) == 1
        assert all(r.hits <= rows["belady"].hits for r in rows.values())
        assert rows["auto"].hits > rows["lru"].hits * 0.99
        assert rows["auto"].in_charge.startswith("auto (")
    everything = replay(trace, "lru", total)
    assert everything.requests - everything.hits == len({(r.layer, i) for r in trace.routes for i in r.ids})


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "requests", "lru", "roof"),
    [("qwen3-30b-a3b", 36864, (18336, 30358, 35501), (27803, 34395, 35793)),
     ("gpt-oss-120b", 4608, (2711, 3543, 4108), (3704, 4108, 4108))],
)  # fmt: skip
def test_recorded_traces_of_real_models(
    shared_traces: Path, name: str, requests: int, lru: tuple[int, ...], roof: tuple[int, ...]
) -> None:
    """Golden hits at 10, 25 and 50 % of the experts."""
    trace = load_trace(shared_traces / f"{name}.route.csv")
    total = sum(trace.sizes())
    for part, expected_lru, expected_roof in zip((10, 25, 50), lru, roof, strict=True):
        found = replay(trace, "lru", round(total * part / 100), Phase.DECODE)
        assert (found.requests, found.hits) == (requests, expected_lru)
        assert replay(trace, "belady", round(total * part / 100), Phase.DECODE).hits == expected_roof
