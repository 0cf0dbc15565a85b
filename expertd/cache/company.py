"""Who is used soon after whom, in one layer: counts of experts that followed within a few tokens, fading with time.

After expert a was used, expert b's count under a grows by 1 for a use one token later, by 0.6 two tokens later, 0.36
three later and so on. The counts under the experts that a token used, as shares, estimate what the next tokens will
use. Learned a few tokens at a time: counts that lag by those lose nothing that can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

_LAG_WEIGHTS = tuple(round(256 * 0.6**lag) / 256 for lag in range(8))
"""By tokens between, in whole 256ths: sums of them are exact in float32 in whatever order a BLAS adds."""
_LAGS = len(_LAG_WEIGHTS)
_PRIOR = 4.0
"""Uses of an expert that the frequencies count for beside its own followers."""
_HALVE_AFTER = 192
"""Tokens after which all counts are halved: topics change."""
_MOST_WAITING = 32
_PATIENCE = 64
"""Learned tokens per token that may wait: while little is known, each one counts at once."""
_FEW = 4
"""Up to so many tokens are added one by one: all counts of a layer are a good deal of memory to pass through."""
_PROMPT_TOKENS = 256
"""Tokens at the end of a prompt's batch that are learned from; more would cost time."""
_MOST_COUNTS = 1 << 24


@lru_cache(maxsize=16)
def _band(n: int) -> Any:
    """(n, _LAGS + n): row t weighs the tokens before token t of a batch, the last `_LAGS` before the batch included."""
    band = np.zeros((n, _LAGS + n), np.float32)
    for t in range(n):
        band[t, t : t + _LAGS] = _LAG_WEIGHTS[::-1]
    return band


class Company:
    """Of one layer of `n_experts`."""

    @staticmethod
    def fits(n_layers: int, n_experts: int) -> bool:
        """Whether the counts of all layers fit in 64 MiB."""
        return n_layers * n_experts * n_experts <= _MOST_COUNTS

    def __init__(self, n_experts: int) -> None:
        n = n_experts + 1  # one more, so that the counts and what is added to them are alike in memory
        self._counts = np.zeros((n, n), np.float32)
        """[a, b]: how much b came after a. The last column is the weight of the frequencies beside them."""
        self._counts[:, -1] = _PRIOR
        self._total = np.zeros(n, np.float32)
        """By a: what its counts come to for each expert that a token uses."""
        self._weight = np.full(n, 1.0 / _PRIOR)
        self._tail = np.zeros((_LAGS, n), np.float32)
        """1 where an expert was used, for the last `_LAGS` tokens learned, oldest first."""
        self._unlearned: list[Sequence[int]] = []
        self._learned = 0
        self._until_halved = _HALVE_AFTER

    def follow(self, ids: Sequence[int]) -> None:
        """A token used the experts of these indices."""
        unlearned = self._unlearned
        if unlearned and len(unlearned[0]) != len(ids):
            self._learn(np.array(unlearned, np.intp))
            unlearned.clear()
        unlearned.append(ids)
        if len(unlearned) >= _MOST_WAITING or len(unlearned) * _PATIENCE > self._learned:
            self._learn(np.array(unlearned, np.intp))
            unlearned.clear()

    def follow_many(self, used: Any) -> None:
        """Tokens in turn used `used`: (tokens, k) indices."""
        if self._unlearned:
            self._learn(np.array(self._unlearned, np.intp))
            self._unlearned.clear()
        self._learn(used[-_PROMPT_TOKENS:])

    def _learn(self, used: Any) -> None:
        n = len(used)
        self._learned += n
        seen = np.zeros((_LAGS + n, len(self._total)), np.float32)
        seen[:_LAGS] = self._tail
        now = seen[_LAGS:]
        now[np.arange(n)[:, None], used] = 1.0
        before = _band(n) @ seen
        if n <= _FEW:
            for row, ids in zip(before, used, strict=True):
                earlier = np.flatnonzero(row)
                self._counts[earlier[:, None], ids] += row[earlier, None]
        else:
            self._counts += before.T @ now
        self._total += before.sum(axis=0)
        self._tail = seen[-_LAGS:]
        self._until_halved -= min(n, _HALVE_AFTER // 2)
        if self._until_halved <= 0:
            self._until_halved += _HALVE_AFTER
            self._counts *= 0.5
            self._counts[:, -1] = _PRIOR
            self._total *= 0.5
        np.divide(1.0, self._total + _PRIOR, out=self._weight)

    def sums(self, used: Any) -> Any:
        """The chances of each expert to be used soon after a token that used `used` (indices as an array), summed over
        those; behind them, as one number more, what the frequencies are to be counted in with."""
        return np.dot(self._weight.take(used), self._counts.take(used, axis=0))
