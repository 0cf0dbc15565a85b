"""The router tap: ids as they are, whatever the strides; no exception ever leaves it."""

from __future__ import annotations

import ctypes
import gc
import platform

import pytest

from expertd.engine import abi
from expertd.engine.model import LoadedModel
from expertd.engine.tap import RouterTap, read_ids
from expertd.types import Phase
from tests.engine.conftest import make_bench


def _tensor(name: bytes, rows: list[list[int]], width: int = 0) -> tuple[abi.Tensor, object]:
    """A topk tensor in this process: row stride `width` ids (0: contiguous)."""
    k, width = len(rows[0]), width or len(rows[0])
    data = (ctypes.c_int32 * (width * len(rows)))(*[-7] * (width * len(rows)))
    for r, row in enumerate(rows):
        data[r * width : r * width + k] = row
    tensor = abi.Tensor(type=abi.GGML_TYPE_I32, name=name, data=ctypes.addressof(data))
    tensor.ne[:] = (k, len(rows), 1, 1)
    tensor.nb[:] = (4, 4 * width, 4 * width * len(rows), 4 * width * len(rows))
    return tensor, data


def _call(tap: RouterTap, tensor: abi.Tensor, ask: bool) -> bool:
    return bool(tap.callback(ctypes.addressof(tensor), ask, None))


@pytest.mark.parametrize("width", [0, 64, 5])
def test_ids_are_the_same_whatever_the_stride(width: int) -> None:
    rows = [[3, 9, 300, 1], [0, 2, 511, 4]]
    tensor, _data = _tensor(b"ffn_moe_topk-0", rows, width)
    assert read_ids(ctypes.addressof(tensor)) == [*rows[0], *rows[1]]


@pytest.fixture(params=[True, False], ids=["filtered", "python"])
def native(request: pytest.FixtureRequest) -> bool:
    """With the filter in machine code, and without."""
    if request.param and platform.machine() != "x86_64":
        pytest.skip("the filter is for x86-64")
    return bool(request.param)


def test_layer_twelve_is_not_layer_one(native: bool) -> None:
    seen: list[tuple[int, list[int], Phase]] = []
    tap = RouterTap(lambda *route: seen.append(route), [512] * 16, native=native)
    assert tap.native == native
    tap.phase = Phase.PREFILL
    for name in (b"ffn_moe_topk-12", b"ffn_moe_topk-1"):
        tensor, _data = _tensor(name, [[1, 2]])
        assert _call(tap, tensor, ask=True)
        assert _call(tap, tensor, ask=False)
    assert seen == [(12, [1, 2], Phase.PREFILL), (1, [1, 2], Phase.PREFILL)]


@pytest.mark.parametrize(
    "name",
    [b"ffn_moe_topk-1 (reshaped)", b"ffn_moe_topk", b"ffn_moe_topk-", b"ffn_moe_topk-x", b"ffn_moe_argsort-1",
     b"ffn_moe_group_topk-1", b"ffn_moe_probs_masked-1", b"Kcur-1", b""],
)  # fmt: skip
def test_only_the_full_name_is_looked_at(name: bytes, native: bool) -> None:
    tap = RouterTap(lambda *_: pytest.fail("must not be called"), [8] * 4, native=native)
    tensor, _data = _tensor(name, [[1]])
    assert not _call(tap, tensor, ask=True)
    assert _call(tap, tensor, ask=False)
    assert tap.counters.splits == 0


def test_ids_of_256_and_more_are_kept_and_ids_out_of_range_dropped_and_counted() -> None:
    seen: list[list[int]] = []
    tap = RouterTap(lambda _layer, ids, _phase: seen.append(ids), [400])
    tensor, _data = _tensor(b"ffn_moe_topk-0", [[256, 399, 400, -1]])
    _call(tap, tensor, ask=False)
    assert seen == [[256, 399]]
    assert (tap.counters.routes, tap.counters.dropped_ids) == (4, 2)


def test_an_exception_of_the_receiver_is_counted_and_the_graph_goes_on() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    tap = RouterTap(broken, [8])
    tensor, _data = _tensor(b"ffn_moe_topk-0", [[1]])
    assert _call(tap, tensor, ask=False)
    assert tap.counters.errors == 1


def test_a_layer_that_nobody_wants_is_not_cut_out() -> None:
    tap = RouterTap(lambda *_: None, [8] * 4, want=lambda layer: layer != 2)
    wanted, other = _tensor(b"ffn_moe_topk-1", [[1]])[0], _tensor(b"ffn_moe_topk-2", [[1]])[0]
    assert (_call(tap, wanted, ask=True), _call(tap, other, ask=True)) == (True, False)
    assert tap.counters.skipped == 1


def test_the_demo_models_routes_are_all_seen(loaded: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    tap = RouterTap(lambda layer, ids, _phase: seen.append((layer, len(ids))), [64] * 8)
    bench = make_bench(loaded, tap)
    _text, tokens, _outcome = bench.run("one two three", max_tokens=5)
    bench.context.close()
    n_prompt = len(bench.ids("one two three"))
    decodes = len(tokens) - 1
    assert seen[:7] == [(layer, 4 * n_prompt) for layer in range(7)]
    assert seen[8:] == [(layer, 4) for layer in range(8)] * decodes
    # The last layer of a prompt computes the last token alone, since only its logits are wanted.
    assert seen[7] == (7, 4)


def test_a_thousand_decodes_with_garbage_collections_and_a_raising_receiver_change_nothing(loaded: LoadedModel) -> None:
    plain = make_bench(loaded, n_ctx=600)
    expected = plain.run("Once upon a time", max_tokens=500, ignore_eos=True)[1]
    plain.context.close()
    calls = 0

    def moody(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 97 == 0:
            gc.collect()
        if calls % 101 == 0:
            raise RuntimeError("now and then")

    tap = RouterTap(moody, [64] * 8)
    tapped = make_bench(loaded, tap, n_ctx=600)
    got = tapped.run("Once upon a time", max_tokens=500, ignore_eos=True)[1]
    tapped.context.close()
    again = make_bench(loaded, tap, n_ctx=600)
    got_again = again.run("Once upon a time", max_tokens=500, ignore_eos=True)[1]
    again.context.close()
    assert (got, got_again) == (expected, expected)
    assert tap.counters.errors > 50
