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
"""By tokens between, in whole 256ths: sums of them are exact in whatever order a BLAS adds."""
_LAGS = len(_LAG_WEIGHTS)
_PRIOR = 4.0
"""Uses of an expert that the frequencies count for beside its own followers."""
_HALVE_AFTER = 192
"""Tokens after which all counts are halved: topics change."""
_PATIENCE = 64
"""Learned tokens per token that may wait: while little is known, each one counts at once."""
_AT_ONCE = 16
"""Tokens added in one product, and the most that wait: small enough that no BLAS wakes threads for it."""
_YOUNG = 1024
"""Learned tokens up to which those that come late are learned at once, for the same reason; then `_LATE` together."""
_LATE = 8
_PROMPT_TOKENS = 256
"""Tokens at the end of a prompt's batch that are learned from; more would cost time."""
_MOST_COUNTS = 1 << 24

_ROWS = np.arange(_AT_ONCE)[:, None]
_ONES = np.ones(_AT_ONCE)


@lru_cache(maxsize=16)
def _band(n: int) -> Any:
    """(n, _LAGS + n): row t weighs the tokens before token t of a batch, the last `_LAGS` before the batch included."""
    band = np.zeros((n, _LAGS + n))
    for t in range(n):
        band[t, t : t + _LAGS] = _LAG_WEIGHTS[::-1]
    return band


class Workspace:
    """What the layers of one model share while one of them learns, so that nothing is allocated."""

    def __init__(self, n_experts: int) -> None:
        self.seen = np.zeros((_LAGS + _AT_ONCE, n_experts))
        self.product = np.empty((n_experts, n_experts))


class Company:
    """Of one layer of `n_experts`. `floor` is the chance of an expert of which nothing is known."""

    @staticmethod
    def fits(n_layers: int, n_experts: int) -> bool:
        """Whether the counts of all layers fit in 128 MiB."""
        return n_layers * n_experts * n_experts <= _MOST_COUNTS

    def __init__(self, n_experts: int, workspace: Workspace, floor: float) -> None:
        self._workspace = workspace
        self._terms = np.zeros((n_experts + 2, n_experts))
        """What chances are sums of, in one array so that one product makes them: the counts, the frequencies, the
        floor."""
        self._counts = self._terms[:n_experts]
        """[a, b]: how much b came after a."""
        self.frequency = self._terms[n_experts]
        """By expert, decayed: the owner's to keep."""
        self._terms[n_experts + 1] = floor
        self._beside = (n_experts, n_experts + 1)
        self._total = np.zeros(n_experts)
        """By a: what its counts come to for each expert that a token uses."""
        self._weight = np.full(n_experts + 2, 1.0 / _PRIOR)
        """By a, what its counts are multiplied with, `_counts` being no shares; two more that do not matter."""
        self._tail = np.zeros((_LAGS, n_experts))
        """1 where an expert was used, for the last `_LAGS` tokens learned, oldest first."""
        self._unlearned: list[Sequence[int]] = []
        self._learned = 0
        self._until_halved = _HALVE_AFTER

    def follow(self, ids: Sequence[int]) -> None:
        """A token used the experts of these indices."""
        self._note(ids)
        waiting = len(self._unlearned)
        if waiting >= _AT_ONCE or waiting * _PATIENCE > self._learned:
            self._catch_up()

    def follow_late(self, visits: Sequence[Sequence[int]]) -> None:
        """Decoded tokens that come several at once, since their layer had nothing to choose before; alike in k."""
        young = self._learned < _YOUNG
        if young:
            self._catch_up()
        for ids in visits:
            self._note(ids)
        if young or len(self._unlearned) >= _LATE:
            self._catch_up()

    def follow_many(self, used: Any) -> None:
        """Tokens of a prompt in turn used `used`: (tokens, k) indices."""
        self._catch_up()
        self._learn(used[-_PROMPT_TOKENS:])

    def _note(self, ids: Sequence[int]) -> None:
        if self._unlearned and len(self._unlearned[0]) != len(ids):
            self._catch_up()
        self._unlearned.append(ids)

    def _catch_up(self) -> None:
        if self._unlearned:
            self._learn(np.array(self._unlearned, np.intp))
            self._unlearned.clear()

    def _learn(self, used: Any) -> None:
        self._learned += len(used)
        for start in range(0, len(used), _AT_ONCE):
            self._add(used[start : start + _AT_ONCE])
        self._until_halved -= min(len(used), _HALVE_AFTER // 2)
        if self._until_halved <= 0:
            self._until_halved += _HALVE_AFTER
            self._counts *= 0.5
            self._total *= 0.5
        weight = self._weight[:-2]
        np.add(self._total, _PRIOR, weight)
        np.divide(1.0, weight, weight)

    def _add(self, used: Any) -> None:
        n, work = len(used), self._workspace
        seen = work.seen[: _LAGS + n]
        seen[:_LAGS] = self._tail
        now = seen[_LAGS:]
        now.fill(0.0)
        now[_ROWS[:n], used] = 1.0
        before = np.dot(_band(n), seen)
        np.dot(before.T, now, work.product)
        np.add(self._counts, work.product, self._counts)
        np.add(self._total, np.dot(_ONES[:n], before), self._total)
        self._tail[:] = seen[n:]

    def chances(self, ids: Sequence[int], out: Any) -> None:
        """Writes, by expert, the chance to be used soon after a token that used `ids`, plus the floor; all times k."""
        terms = np.array([*ids, *self._beside], np.intp)
        weight = self._weight.take(terms)
        k = len(ids)
        weight[k] = _PRIOR * sum(weight.tolist()[:k])
        weight[k + 1] = k
        np.dot(weight, self._terms.take(terms, axis=0), out)
