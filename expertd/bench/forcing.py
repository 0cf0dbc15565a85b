"""Forces recorded routes upon a model while it runs, in any arm: the ids are overwritten when the router has computed
them.

Both arms pay the same for it, the split of the graph at each layer and a callback, so a comparison stays one; absolute
speeds come out a little lower than the model's own.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from expertd.bench.routes import Routes
from expertd.engine import abi


class ForcedRoutes:
    """Give `rewrite` to a tap. The thread that decodes calls it; `restart` before each prompt, between decodes.

    Which token a row belongs to follows from the order of calls: a layer number that does not rise starts a new batch,
    whose size is the rows of its first layer. The last layer may have fewer rows, those whose output is asked for:
    they are the batch's last ones.
    """

    def __init__(self, routes: Routes, layers: Sequence[int]) -> None:
        """`layers` are the model's layers that route."""
        self.wrapped = False
        """Whether the run was longer than the trace, which then started over."""
        self._ids = _packed(routes, layers)
        self._n_tokens = len(routes.tokens)
        self._nbytes = 4 * routes.k
        self.restart()

    def restart(self) -> None:
        """The next batch starts at the trace's first token."""
        self._layer = -1
        self._start = self._rows = 0

    def rewrite(self, address: int, layer: int) -> None:
        """Overwrite the ids [k, rows] of the tensor at `address`."""
        tensor = abi.Tensor.from_address(address)
        rows = tensor.ne[1]
        if layer <= self._layer or self._layer < 0:
            self._start += self._rows
            self._rows = rows
        self._layer = layer
        if not rows or tensor.ne[0] * 4 != self._nbytes:
            return
        ids, n = self._ids[layer], self._n_tokens
        first = self._start + self._rows - rows
        self.wrapped |= first + rows > n
        at, stride = tensor.data, tensor.nb[1]
        for row in range(rows):
            ctypes.memmove(at + row * stride, ids[(first + row) % n], self._nbytes)


def _packed(routes: Routes, layers: Sequence[int]) -> dict[int, list[bytes]]:
    """int32 ids by layer and token. A layer that no token has repeats the layer below it, or the trace's first."""
    first = min(layer for token in routes.tokens for layer in token)
    packed: dict[int, list[bytes]] = {}
    below = _column(routes, first)
    for layer in layers:
        packed[layer] = below = _column(routes, layer) or below
    return packed


def _column(routes: Routes, layer: int) -> list[bytes]:
    """One layer's ids by token, empty when it has none. A token without (traces lose the last layer of a prompt's
    tokens) repeats the token before it."""
    known = [token.get(layer) for token in routes.tokens]
    last = next((ids for ids in known if ids), None)
    if last is None:
        return []
    column = []
    for ids in known:
        last = ids or last
        column.append(array("i", last).tobytes())
    return column
