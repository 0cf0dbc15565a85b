"""Reads the next layer's likely experts while this layer computes: guess, judge, fetch.

`engine.lookahead` guesses by asking the next router early, `cache.confidence` learns which guesses are worth a read,
the cache makes room as it would for the route itself, and the pager's thread reads. Engine thread, after the layer's
own experts were asked for, so that a guess never goes before what is needed now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expertd.cache.confidence import Confidence
from expertd.cache.decision import Decision
from expertd.engine.lookahead import Lookahead
from expertd.runtime.steering import Steering
from expertd.types import Phase

_EXTRA = 2
"""Candidates beyond the router's own k: their turning out is learned, and near the border some are right."""
_PATIENCE_TOKENS = 24
"""Tokens without a guess worth acting on after which guessing rests."""
_REST_TOKENS = 64
"""While it rests, one token in so many is still guessed, to learn when that changes."""


class Ahead:
    """`after` is the tap's. Does nothing in prompts: there whole layers are streamed."""

    def __init__(self, steering: Steering, lookahead: Lookahead | None = None) -> None:
        used = steering.layout.n_experts_used
        self._steering = steering
        self._lookahead = lookahead or Lookahead(used + _EXTRA)
        self.confidence = Confidence()
        self.read = 0
        """Experts read on a guess."""
        self._next = steering.next_layer
        self._first = steering.layout.layers[0].layer
        self._token = 0
        self._acted = 0
        self._expected = -1

    def after(self, address: int, layer: int, ids: Sequence[int], phase: Phase) -> None:
        """This layer's choice is known: settle the guess for it, make the one for the next."""
        if phase is not Phase.DECODE:
            self._expected = -1
            return
        if layer == self._first:
            self._token += 1
        if layer == self._expected:
            self.confidence.settle(ids)
        self._expected = -1
        upcoming = self._next.get(layer)
        if upcoming is None or not self._worth_guessing():
            return
        guesses = self._lookahead.guess(address, layer, upcoming, len(ids))
        base = upcoming * self._steering.layout.n_experts
        absent = self._steering.absent
        chosen = self.confidence.choose([(e, m) for e, m in guesses if absent(base + e)])
        self._expected = upcoming
        if chosen:
            self._acted = self._token
            self.read += len(self._steering.act(_expect([base + e for e in chosen])).fetch)

    def _worth_guessing(self) -> bool:
        return self._token - self._acted < _PATIENCE_TOKENS or self._token % _REST_TOKENS == 0


def _expect(experts: list[int]) -> Callable[..., Decision]:
    return lambda cache: cache.expect(experts)
