from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as L

from expertd.bench.forcing import ForcedRoutes
from expertd.bench.routes import Routes, load
from expertd.bench.synth import write
from expertd.engine import abi
from expertd.engine.model import start_backend
from expertd.engine.tap import RouterTap
from expertd.errors import BenchError, StateError
from expertd.types import Phase


def test_a_trace_is_a_series_of_tokens(write_trace: Callable[..., Path]) -> None:
    path = write_trace([(0, 0, 0, [3, 1]), (0, 0, 1, [2, 0]), (0, 1, 0, [4, 5]), (1, 2, 0, [1, 2]), (1, 2, 1, [7, 6])])
    routes = load(path)
    assert routes == Routes(({0: (3, 1), 1: (2, 0)}, {0: (4, 5)}, {0: (1, 2), 1: (7, 6)}), 2, 2, 2, 8)


def test_recorded_traces(shared_traces: Path) -> None:
    routes = load(shared_traces / "qwen3-30b-a3b.route.csv")
    assert (len(routes.tokens), routes.prompt_tokens, routes.k) == (156, 28, 6)
    assert (routes.n_layers, routes.n_experts) == (48, 128)


def test_what_is_no_trace(tmp_path: Path, write_trace: Callable[..., Path]) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(StateError, match="cannot read the trace"):
        load(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(StateError, match="is no trace"):
        load(path)
    path.write_text("turn,phase,step,layer,expert\n0,1,0,0,x\n")
    with pytest.raises(StateError, match="is no route"):
        load(path)
    path.write_text("turn,phase,step,layer,expert\n")
    with pytest.raises(StateError, match="holds no routes"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00GGUF")
    with pytest.raises(StateError):
        load(path)
    with pytest.raises(StateError, match="one number is needed"):
        load(write_trace([(1, 0, 0, [1, 2]), (1, 1, 0, [3])]))


def test_what_does_not_fit_is_refused(write_trace: Callable[..., Path]) -> None:
    routes = load(write_trace([(1, 0, 0, [1, 9])]))
    with pytest.raises(BenchError, match="routes 2 experts a token, the model 4"):
        routes.check_fits(layers=1, experts=16, k=4)
    with pytest.raises(BenchError, match="names expert 9, the model has 8"):
        routes.check_fits(layers=1, experts=8, k=2)
    routes.check_fits(layers=3, experts=10, k=2)


class Node:
    """A tensor of ids as llama.cpp shows it, rows `stride` ids apart."""

    def __init__(self, k: int, rows: int, stride: int) -> None:
        self.memory = (ctypes.c_int32 * (stride * max(rows, 1)))(*([-1] * stride * max(rows, 1)))
        self.tensor = abi.Tensor()
        self.tensor.type = abi.GGML_TYPE_I32
        self.tensor.ne[:] = [k, rows, 1, 1]
        self.tensor.nb[:] = [4, 4 * stride, 4 * stride * rows, 4 * stride * rows]
        self.tensor.data = ctypes.addressof(self.memory)
        self.k, self.rows, self.stride = k, rows, stride

    @property
    def address(self) -> int:
        return ctypes.addressof(self.tensor)

    def ids(self) -> list[list[int]]:
        return [list(self.memory[r * self.stride : r * self.stride + self.k]) for r in range(self.rows)]


def _routes(n_tokens: int, layers: int) -> Routes:
    tokens = tuple({layer: (10 * t + layer, 10 * t + layer + 5) for layer in range(layers)} for t in range(n_tokens))
    return Routes(tokens, 3, 2, layers, 10 * n_tokens + 10)


def test_rows_follow_the_position() -> None:
    forced = ForcedRoutes(_routes(6, 2), [0, 1])
    batch = [Node(2, 3, 2), Node(2, 1, 2)]  # a prompt of three tokens, of which the last layer computes one
    step = [Node(2, 1, 8), Node(2, 1, 8)]  # a strided view, as an argsort leaves it
    for layer, node in enumerate(batch):
        forced.rewrite(node.address, layer)
    for layer, node in enumerate(step):
        forced.rewrite(node.address, layer)
    assert batch[0].ids() == [[0, 5], [10, 15], [20, 25]]
    assert batch[1].ids() == [[21, 26]]
    assert step[0].ids() == [[30, 35]]
    assert step[1].ids() == [[31, 36]]
    assert list(step[0].memory[2:]) == [-1] * 6, "nothing beside the view is touched"
    forced.restart()
    again = Node(2, 1, 2)
    forced.rewrite(again.address, 0)
    assert again.ids() == [[0, 5]]
    assert not forced.wrapped


def test_a_long_run_starts_the_trace_over() -> None:
    forced = ForcedRoutes(_routes(2, 1), [0])
    seen = []
    for _ in range(3):
        node = Node(2, 1, 2)
        forced.rewrite(node.address, 0)
        seen += node.ids()
    assert seen == [[0, 5], [10, 15], [0, 5]]
    assert forced.wrapped


def test_gaps_of_a_trace_are_filled() -> None:
    routes = Routes(({1: (1, 2)}, {0: (3, 4), 1: (5, 6)}, {0: (7, 8)}), 0, 2, 2, 9)
    forced = ForcedRoutes(routes, [0, 1, 2])
    seen: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for _ in range(3):
        for layer in seen:
            node = Node(2, 1, 2)
            forced.rewrite(node.address, layer)
            seen[layer] += node.ids()
    assert seen[0] == [[3, 4], [3, 4], [7, 8]], "a token without a layer repeats the one before it, or takes the first"
    assert seen[1] == [[1, 2], [5, 6], [5, 6]]
    assert seen[2] == seen[1], "a layer that the trace lacks repeats the one below"


def test_llama_cpp_follows_the_forced_routes(tmp_path: Path, small_geometry) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "m.gguf"
    write(small_geometry, path)
    n, k = 12, small_geometry.experts_used
    tokens = tuple({layer: tuple((t * 3 + layer + i) % 16 for i in range(k)) for layer in range(3)} for t in range(n))
    forced = ForcedRoutes(Routes(tokens, 8, k, 3, 16), range(3))
    seen: list[tuple[int, list[int], Phase]] = []
    tap = RouterTap(lambda layer, ids, phase: seen.append((layer, ids, phase)), [16] * 3, rewrite=forced.rewrite)
    start_backend()
    params = L.llama_model_default_params()
    params.use_extra_bufts = False
    model = L.llama_model_load_from_file(str(path).encode(), params)
    settings = L.llama_context_default_params()
    settings.n_ctx, settings.cb_eval, settings.n_ubatch = 128, tap.callback, 5
    context = L.llama_init_from_model(model, settings)
    prompt = (L.llama_token * 8)(*range(300, 308))
    assert L.llama_decode(context, L.llama_batch_get_one(prompt, 8)) == 0
    for token in range(4):
        one = (L.llama_token * 1)(token)
        assert L.llama_decode(context, L.llama_batch_get_one(one, 1)) == 0
    L.llama_free(context)
    L.llama_model_free(model)
    assert tap.counters.errors == 0
    first_layer = [i for layer, ids, _ in seen if layer == 0 for i in ids]
    assert first_layer == [i for t in range(n) for i in tokens[t][0]], "micro-batches of 5 and 3, then 4 tokens"
    last_layer = [ids for layer, ids, _ in seen if layer == 2]
    assert last_layer == [list(tokens[t][2]) for t in range(7, n)], "the last layer computes output tokens alone"


def test_unwanted_layers_are_forced_but_not_reported() -> None:
    forced = ForcedRoutes(_routes(2, 1), [0])
    seen: list[int] = []
    tap = RouterTap(
        lambda layer, ids, phase: seen.append(layer), [30], want=lambda layer: False, rewrite=forced.rewrite
    )
    node = Node(2, 1, 2)
    node.tensor.name = b"ffn_moe_topk-0"
    assert tap.callback(node.address, True, None)
    assert tap.callback(node.address, False, None)
    assert node.ids() == [[0, 5]]
    assert seen == []
    assert (tap.counters.skipped, tap.counters.splits) == (1, 0)
