"""Guesses the next layer's experts while this layer computes, by asking the next layer's router now.

The residual stream changes little from one layer to the next, so the next router applied to this layer's normalised
input picks most of what it will pick (on the built-in model 40 % of the four at rank 2, 65 % at rank 4; others measured
59 to 89 %). Input and weights are reached from the topk node that the tap looks at: its ancestors up to the router's
matmul are still alive, since the experts read the same input. Weights are read where llama.cpp keeps them; nothing is
copied. The guess is approximate: what is done with it, and whether it pays, is decided elsewhere (`cache.confidence`).

Not guessed: prompts, models whose router is not F32 or has more than a softmax or a sigmoid before the choice, and
tensors that are not in host memory. Node operations are told by what they have as sources, not by their numbers, which
change between releases.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd.engine import abi

_ROUTER = b".ffn_gate_inp.weight"
_MAX_STEPS = 6
_GGML_TYPE_F32 = 0

Floats = npt.NDArray[np.float32]


class Lookahead:
    """Learns each layer's router when the layer is first seen; from the second token on it can guess.

    Engine thread, inside the tap's callback. `failed` says why it gave up for this model; then it never guesses.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        """Candidates a guess has."""
        self.failed = ""
        self._routers: dict[int, Floats] = {}
        self._norms: dict[int, Floats | None] = {}
        self._ratios: dict[tuple[int, int], Floats | None] = {}

    def guess(self, address: int, layer: int, upcoming: int, k: int) -> list[tuple[int, float]]:
        """(expert index, margin) of the likeliest experts of layer `upcoming`, for the one token of the topk node at
        `address` of `layer`; best first.

        The margin is the logit above the border between the k-th and the next, in standard deviations of the logits:
        above 0 the guess says "chosen", and the further the surer. Empty where nothing can be told.
        """
        if self.failed:
            return []
        found = _router_input(address)
        if found is None:
            self.failed = "the router's input cannot be reached from its choice"
            return []
        router, entry = found
        if layer not in self._routers and not self._learn(layer, router, entry):
            return []
        weights = self._routers.get(upcoming)
        if weights is None:
            return []
        value = _floats(entry, entry.ne[0])
        ratio = self._ratio(layer, upcoming)
        logits: Floats = np.asarray(weights @ (value if ratio is None else value * ratio), np.float32)
        return _likeliest(logits, k, self.width)

    def _learn(self, layer: int, router: Any, entry: Any) -> bool:
        if router.type != _GGML_TYPE_F32 or entry.type != _GGML_TYPE_F32 or entry.ne[1] != 1:
            self.failed = "the router is not F32"
            return False
        self._routers[layer] = _floats(router, router.ne[0] * router.ne[1]).reshape(router.ne[1], router.ne[0])
        self._norms[layer] = _norm_weights(entry)
        return True

    def _ratio(self, layer: int, upcoming: int) -> Floats | None:
        """What turns this layer's norm into the next one's: their weights differ, the normalised stream hardly."""
        key = (layer, upcoming)
        if key not in self._ratios:
            here, there = self._norms[layer], self._norms[upcoming]
            usable = here is not None and there is not None and bool((here != 0).all())
            self._ratios[key] = there / here if usable and there is not None and here is not None else None
        return self._ratios[key]


def _router_input(address: int) -> tuple[Any, Any] | None:
    """(router weights, input) behind a topk node; None where the chain is another one."""
    node = abi.Tensor.from_address(address)
    for _ in range(_MAX_STEPS):
        if not node.src[0]:
            return None
        source = abi.Tensor.from_address(node.src[0])
        if source.name.endswith(_ROUTER):
            entry = abi.Tensor.from_address(node.src[1]) if node.src[1] else None
            return (source, entry) if entry is not None and _in_host(entry) and _in_host(source) else None
        node = source
    return None


def _norm_weights(entry: Any) -> Floats | None:
    """The norm's weights where the input is `rms_norm(x) * weights`."""
    if not entry.src[1]:
        return None
    weights = abi.Tensor.from_address(entry.src[1])
    if weights.type != _GGML_TYPE_F32 or weights.ne[0] != entry.ne[0] or weights.ne[1] != 1 or not _in_host(weights):
        return None
    return _floats(weights, weights.ne[0])


def _in_host(tensor: Any) -> bool:
    return bool(tensor.data) and bool(tensor.buffer) and abi.ggml().ggml_backend_buffer_is_host(tensor.buffer)


def _floats(tensor: Any, count: int) -> Floats:
    """A view, not a copy."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(tensor.data))


def _likeliest(logits: Floats, k: int, width: int) -> list[tuple[int, float]]:
    if len(logits) <= k:
        return []
    order = np.argsort(-logits)
    border = (logits[order[k - 1]] + logits[order[k]]) / 2
    spread = float(logits.std()) or 1.0
    return [(int(i), float(logits[i] - border) / spread) for i in order[:width]]
