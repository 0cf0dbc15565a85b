"""Company and recency in one rank: the default policy, and the only one that learns who follows whom.

An expert's rank in its layer is `(company + 0.03) / (1 + age)^0.15`, where
- age is the number of the layer's tokens since its last use,
- company is its chance of use soon, given which experts the layer used just now: learned from how often it came within
  a few tokens after each of them, with its decayed frequency (half-life in tokens, by the layer's own clock) as the
  prior. This is what a decayed score alone cannot see, and most of what the policy gains over one.

How these weights, and what else was tried, were measured stands in docs/policies.md.

How a victim is found:
1. Visits to a layer are noted and worked off when that layer must choose, or a few at a time: a layer whose experts all
   hit has nothing to choose.
2. A layer that misses ranks its experts anew; the others keep the rank of their last choice. The coldest resident of
   each layer is its candidate.
3. The victim is the candidate with the longest wait, `1 / p + d` tokens: `p` is the rank as a chance of use in a token,
   `d` the share of a token until the layer's next turn. Layers are visited in turn, so a layer just passed can wait
   longest. Where everything is used by every token, only `d` tells: the budget then serves the layers ahead.

Ranks are compared as float32 of float64 sums, so that a trace replays to the same decisions on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from expertd.cache.company import Company, Workspace

_AGE_POWER = -0.15
_FLOOR = 0.03
"""A chance of about one in 33 tokens is as good as none: smooths what was seen once or never."""
_OLDEST = 255
_NO_WAIT = -1e9
"""The wait of a layer that has no candidate."""
_MOST_WAITING = 16
"""Visits of a layer that may wait to be worked off."""
_PROMPT_SHARE = 0.5
"""The most that a prompt may replace of what decoding taught, however long it is."""

_ROWS = np.arange(_MOST_WAITING)[:, None]
_BACK = np.arange(_MOST_WAITING - 1, -1, -1)[:, None]


@lru_cache(maxsize=64)
def _age_factor(k: int) -> Any:
    """By age, divided by k."""
    return np.array([(1 + a) ** _AGE_POWER / k for a in range(_OLDEST + 1)])


class HybridPolicy:
    name = "hybrid"

    def __init__(self, n_layers: int, n_experts: int, half_life: float) -> None:
        self._n_layers, self._n_experts = n_layers, n_experts
        self._decay = 2.0 ** (-1.0 / half_life)
        self._rate = 1.0 - self._decay
        fade = [self._decay ** np.arange(n, -1, -1) for n in range(_MOST_WAITING + 1)]
        self._fade = [(f[0], self._rate * f[1:]) for f in fade]
        """By number of visits worked off at once: what is left of a frequency, and what each of them adds."""
        self._age = list(np.full((n_layers, n_experts), _OLDEST, np.int64))
        work = Workspace(n_experts)
        fits = Company.fits(n_layers, n_experts)
        self._company = [Company(n_experts, work, _FLOOR) for _ in range(n_layers)] if fits else None
        self._frequency = [c.frequency for c in self._company or ()] or list(np.zeros((n_layers, n_experts)))
        self._recent: list[Sequence[int] | None] = [None] * n_layers
        """The indices that a layer used last, where that was a decoded token's."""
        self._waiting: list[list[Sequence[int]]] = [[] for _ in range(n_layers)]
        self._taught = [0.0] * n_layers
        """How far a layer's frequencies are from nothing known (0): what a prompt must not wash out."""
        self._before: list[tuple[Any, float, Any, float] | None] = [None] * n_layers
        """While a prompt runs: frequencies and `taught` before it, its own frequencies and how far those are."""

        self._rank = list(np.zeros((n_layers, n_experts)))
        self._barred = list(np.full((n_layers, n_experts), np.inf, np.float32))
        """0 for residents, infinity for others: added to a rank."""
        self._open = list(np.full((n_layers, n_experts), np.inf, np.float32))
        """Ranks of the residents; infinity for others, and for those that the choice at hand passes over."""
        self._held: Container[int] = ()
        """Those that the choice at hand must not take: the same object says that it is still the same choice."""
        self._passed: list[int] = []
        """Of those, the ones that are shut out of `_open` until the next choice."""
        self._ranked = [False] * n_layers
        self._unsettled = set(range(n_layers))
        """Layers whose candidate may not be their coldest."""
        self._candidate = [-1] * n_layers
        self._lowest = [np.inf] * n_layers
        """The candidates' ranks."""
        self._wait = np.full(n_layers, _NO_WAIT)
        ahead = np.arange(1, n_layers + 1) / n_layers
        both = np.concatenate([ahead, ahead])
        self._ahead = [both[start : start + n_layers] for start in range(n_layers - 1, -1, -1)]
        """By layer at work, then by layer: the share of a token until its turn."""
        self._until = np.empty(n_layers)

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        if n_tokens > 1:
            self._work_off(layer)
            self._take_prompt(layer, ids, n_tokens)
            return
        waiting = self._waiting[layer]
        if waiting and len(waiting[0]) != len(ids):
            self._work_off(layer)
        waiting.append(ids)
        if len(waiting) >= _MOST_WAITING:
            self._work_off(layer)
            self._ranked[layer] = False

    def _work_off(self, layer: int) -> None:
        waiting = self._waiting[layer]
        if not waiting:
            return
        if self._before[layer] is not None:
            self._before[layer] = None
            self._taught[layer] = 1.0
        frequency, age, n = self._frequency[layer], self._age[layer], len(waiting)
        company = self._company[layer] if self._company is not None else None
        if n == 1:
            ids = waiting[0]
            if company is not None:
                company.follow(ids)
            used = np.array(ids, np.intp)
            np.multiply(frequency, self._decay, frequency)
            frequency[used] += self._rate
            np.add(age, 1, age)
            age[used] = 0
        else:
            used = np.array(waiting, np.intp)
            if company is not None:
                company.follow_late(waiting)
            seen = np.zeros((n, self._n_experts))
            seen[_ROWS[:n], used] = 1.0
            left, weights = self._fade[n]
            np.multiply(frequency, left, frequency)
            np.add(frequency, np.dot(weights, seen), frequency)
            np.add(age, n, age)
            age[used] = _BACK[-n:]
        self._recent[layer] = waiting[-1]
        self._taught[layer] = 1.0 - (1.0 - self._taught[layer]) * self._decay**n
        waiting.clear()

    def _take_prompt(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        """A batch of a prompt, as if its tokens had come one by one, but for what decoding taught: of that a prompt
        replaces `_PROMPT_SHARE` at most, or a long one would wash it out."""
        used = np.array(ids, np.intp)
        position = np.arange(len(used)) * n_tokens // len(used)
        age = self._age[layer]
        age += n_tokens
        age[used] = n_tokens - 1 - position
        if self._company is not None:
            self._company[layer].follow_many(used.reshape(n_tokens, -1))
        before = self._before[layer]
        if before is None:
            before = (self._frequency[layer].copy(), self._taught[layer], np.zeros(self._n_experts), 0.0)
        base, taught, own, far = before
        left = self._decay**n_tokens
        weights = self._rate * self._decay ** (n_tokens - 1 - position)
        own = own * left + np.bincount(used, weights, self._n_experts)
        far = 1.0 - (1.0 - far) * left
        self._before[layer] = (base, taught, own, far)
        keep = max(1.0 - far, 1.0 - _PROMPT_SHARE) if taught > 0.0 else 0.0
        self._frequency[layer][:] = keep * base + own * (1.0 - keep * taught) / far
        self._recent[layer] = None
        self._ranked[layer] = False

    def insert(self, expert: int) -> None:
        layer, index = divmod(expert, self._n_experts)
        self._barred[layer][index] = 0.0
        if expert in self._held:
            self._passed.append(expert)
        else:
            self._open_up(layer, index)

    def remove(self, expert: int) -> None:
        layer, index = divmod(expert, self._n_experts)
        self._barred[layer][index] = np.inf
        self._open[layer][index] = np.inf
        if self._candidate[layer] == index:
            self._unsettled.add(layer)

    def victim(self, layer: int, held: Container[int]) -> int:
        if held is not self._held:
            self._held = held
            self._admit_passed()
        if self._waiting[layer] or not self._ranked[layer]:
            self._rank_anew(layer)  # 2
        while self._unsettled:
            self._settle(self._unsettled.pop())
        until, ahead = self._until, self._ahead[layer]
        while True:
            np.add(self._wait, ahead, until)  # 3
            coldest = int(until.argmax())
            index = self._candidate[coldest]
            if index < 0:
                return -1
            expert = coldest * self._n_experts + index
            if self._waiting[coldest] and self._just_used(coldest, index):
                self._rank_anew(coldest)
            elif expert in held:
                self._open[coldest][index] = np.inf
                self._passed.append(expert)
                self._settle(coldest)
            else:
                return expert

    def _admit_passed(self) -> None:
        """Those that the last choice passed over can be chosen again."""
        for expert in self._passed:
            layer, index = divmod(expert, self._n_experts)
            if not self._barred[layer][index]:
                self._open_up(layer, index)
        self._passed.clear()

    def _open_up(self, layer: int, index: int) -> None:
        """A resident can be chosen: it is its layer's candidate where it is colder than that."""
        ranks = self._open[layer]
        ranks[index] = self._rank[layer][index]
        rank: float = ranks.item(index)
        if not self._ranked[layer]:
            self._unsettled.add(layer)
        elif rank < self._lowest[layer] or (rank == self._lowest[layer] and index < self._candidate[layer]):
            self._lowest[layer], self._candidate[layer], self._wait[layer] = rank, index, 1.0 / rank

    def _just_used(self, layer: int, index: int) -> bool:
        """Whether visits that wait to be worked off speak against the candidate."""
        return any(index in ids for ids in self._waiting[layer])

    def _rank_anew(self, layer: int) -> None:
        self._work_off(layer)
        frequency, recent, rank = self._frequency[layer], self._recent[layer], self._rank[layer]
        if recent is not None and self._company is not None:
            k = len(recent)
            self._company[layer].chances(recent, rank)
        else:
            k = 1
            np.add(frequency, _FLOOR, rank)
        np.multiply(rank, _age_factor(k).take(self._age[layer], mode="clip"), rank)
        ranks = self._open[layer]
        ranks[:] = rank
        np.add(ranks, self._barred[layer], ranks)
        self._ranked[layer] = True
        self._unsettled.discard(layer)
        self._settle(layer)

    def _settle(self, layer: int) -> None:
        """Find a layer's candidate."""
        if not self._ranked[layer]:
            self._rank_anew(layer)
            return
        ranks = self._open[layer]
        index = int(ranks.argmin())
        rank: float = ranks.item(index)
        self._lowest[layer] = rank
        if rank == math.inf:
            self._candidate[layer], self._wait[layer] = -1, _NO_WAIT
        else:
            self._candidate[layer], self._wait[layer] = index, 1.0 / rank

    def age(self, expert: int) -> int:
        """Tokens of its layer since an expert was used, as far as visits are worked off."""
        layer, index = divmod(expert, self._n_experts)
        return int(self._age[layer][index])

    def score(self, expert: int) -> float:
        layer, index = divmod(expert, self._n_experts)
        return float(self._frequency[layer][index] / self._rate)

    def scores(self) -> list[float]:
        return [float(s) for s in np.concatenate(self._frequency) / self._rate]

    def load(self, expert: int, score: float) -> None:
        layer, index = divmod(expert, self._n_experts)
        self._work_off(layer)
        self._frequency[layer][index] = score * self._rate
        self._taught[layer] = 1.0
        self._ranked[layer] = False
