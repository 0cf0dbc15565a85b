"""The router tap: reads which experts the router picked, at the moment llama.cpp has computed it.

llama.cpp asks its eval callback about every node of the graph; the tap says yes to `ffn_moe_topk-<layer>` alone (a
filter in machine code says no to the others: `ask`). Then that node is computed, everything before it is done, and the
tap is called again to look. Between that call's return and the expert matmuls lies the moment to fetch.

Ids are int32 of shape [k, tokens]. In some versions the node is a view on the argsort with a row stride of
n_expert * 4 bytes, so rows are read by nb[1]; k is ne[0], since it can differ by layer. On a GPU the data is fetched
with ggml_backend_tensor_get.

The callback runs in the thread that decodes. An exception in it would make ctypes return false, which stops the graph:
it never leaves. Node addresses are reused between graphs, so nothing is remembered by address.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_cpp import llama_cpp as L

from expertd.engine import abi
from expertd.engine.ask import filtered
from expertd.types import Phase

log = logging.getLogger("expertd.tap")

Routed = Callable[[int, list[int], Phase], None]
"""Called with layer, the flat ids of all tokens (token-major, k each) and the phase."""

_PREFIX = b"ffn_moe_topk-"
_NAME_AT = abi.Tensor.name.offset
# Eight bytes within the name that only these nodes have there. Nearly all nodes are told by them alone: by the filter,
# or where there is none by reading a number, which takes a third of the time that reading a string does.
_MARK_AT = _NAME_AT + 4
_MARK = int.from_bytes(_PREFIX[4:12], sys.byteorder)
_MAX_LAYERS = 1024


@dataclass
class TapCounters:
    """Plain integers; the engine thread alone writes them."""

    splits: int = 0
    """Times the graph was cut to look."""
    routes: int = 0
    """Routed experts seen: k a token a layer."""
    dropped_ids: int = 0
    """Ids out of range, not passed on."""
    errors: int = 0
    """Exceptions of the receiver, swallowed."""
    seconds: float = 0.0
    """Spent in Python between being called with a computed node and returning, the receiver included."""
    skipped: int = 0
    """Layers at which the tap did not ask to look, since nothing was to be decided."""


@dataclass
class RouterTap:
    """One a context. `n_experts[layer]` bounds the ids."""

    routed: Routed
    n_experts: Sequence[int]
    phase: Phase = Phase.DECODE
    enabled: bool = True
    counters: TapCounters = field(default_factory=TapCounters)
    want: Callable[[int], bool] | None = None
    """Asked for each layer before it is tapped; None taps all."""
    rewrite: Callable[[int, int], None] | None = None
    """Given a computed node's address and its layer before the ids are read, to put others there: so a benchmark forces
    recorded routes. While it is set the graph is cut at every layer."""
    _report: bool = field(default=True, init=False)
    """Whether the node that was asked for is to be reported too; llama.cpp asks and shows in pairs."""
    native: bool = True
    """Whether to put the filter before the callback where there can be one; False after that where there is none."""

    def __post_init__(self) -> None:
        names = {_PREFIX + str(layer).encode(): layer for layer in range(_MAX_LAYERS)}
        self.callback = self._build(names)
        before = filtered(self.callback, _MARK_AT, _MARK) if self.native else None
        if before is None and self.native:
            log.info("there is no filter in machine code here: the tap is asked about every node, a microsecond each")
        self.native = before is not None
        self.callback = before or self.callback

    def _build(self, names: dict[bytes, int]) -> Any:
        """The ctypes callback, closed over locals: it is called some 50 times a layer for each token."""
        counters = self.counters
        string_at, number_at = ctypes.string_at, ctypes.c_uint64.from_address
        name_at, mark_at, mark = _NAME_AT, _MARK_AT, _MARK

        def on_node(address: int, ask: bool, _user: object) -> bool:
            try:
                if ask:
                    if number_at(address + mark_at).value != mark:
                        return False
                    layer = names.get(string_at(address + name_at))
                    if layer is None:
                        return False
                    wanted = self.enabled
                    if wanted and self.want is not None and not self.want(layer):
                        counters.skipped += 1
                        wanted = False
                    self._report = wanted
                    return wanted or self.rewrite is not None
                layer = names.get(string_at(address + name_at))
                if layer is not None:
                    began = time.perf_counter()
                    self._look(address, layer)
                    counters.seconds += time.perf_counter() - began
            except Exception:
                counters.errors += 1
                if counters.errors == 1:
                    log.exception("the router tap failed once; decoding goes on")
            return True

        return L.ggml_backend_sched_eval_callback(on_node)

    def _look(self, address: int, layer: int) -> None:
        if self.rewrite is not None:
            self.rewrite(address, layer)
            if not self._report:
                return
        ids = read_ids(address)
        counters = self.counters
        counters.splits += 1
        counters.routes += len(ids)
        limit = self.n_experts[layer] if layer < len(self.n_experts) else 0
        if ids and (max(ids) >= limit or min(ids) < 0):
            kept = [i for i in ids if 0 <= i < limit]
            counters.dropped_ids += len(ids) - len(kept)
            ids = kept
        if ids:
            self.routed(layer, ids, self.phase)


def read_ids(address: int) -> list[int]:
    """The int32 ids of a [k, tokens] tensor, token by token, whatever its row stride. Other types give none."""
    tensor = abi.Tensor.from_address(address)
    if tensor.type != abi.GGML_TYPE_I32 or not tensor.data:
        return []
    k, rows, stride = tensor.ne[0], tensor.ne[1], tensor.nb[1]
    if not rows:
        # The last layer of a micro-batch of which no output is asked for.
        return []
    if tensor.buffer and not abi.ggml().ggml_backend_buffer_is_host(tensor.buffer):
        return _read_device_ids(address, k, rows, stride)
    if rows == 1 or stride == 4 * k:
        return list((ctypes.c_int32 * (k * rows)).from_address(tensor.data)[:])
    width = stride // 4
    flat = (ctypes.c_int32 * (width * (rows - 1) + k)).from_address(tensor.data)[:]
    ids: list[int] = []
    for row in range(rows):
        ids += flat[row * width : row * width + k]
    return ids


def _read_device_ids(address: int, k: int, rows: int, stride: int) -> list[int]:
    buffer = (ctypes.c_int32 * k)()
    ids: list[int] = []
    for row in range(rows):
        abi.ggml().ggml_backend_tensor_get(address, ctypes.addressof(buffer), row * stride, 4 * k)
        ids += buffer[:]
    return ids
