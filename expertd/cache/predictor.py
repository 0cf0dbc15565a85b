"""Guesses the next layer's experts from what this layer chose: counts of who followed whom, from layer to layer.

For models whose own router cannot be asked early (`engine.lookahead` does that and is surer). The chance of expert b in
the next layer is the mean, over the experts that this layer chose, of b's share among what followed each of them, with
b's decayed frequency as the prior.

It switches itself off: guesses are scored whether or not they are acted on, and while less than `threshold` of those
of late were right, `propose` says nothing. Pure; one thread. docs/policies.md has its recall and precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

THRESHOLD = 0.6
_PRIOR = 2.0
_DECAY = 2.0 ** (-1.0 / 64)
_HALVE_AFTER = 512
"""Tokens after which counts are halved."""
_FADE = 1.0 - 1.0 / 512
_LEAST_SCORED = 64.0
_MOST_COUNTS = 1 << 24


class Predictor:
    """`most` guesses a layer at most. None is made where the counts would take more than 64 MiB."""

    def __init__(self, n_layers: int, n_experts: int, most: int, threshold: float = THRESHOLD) -> None:
        self.most, self.threshold = most, threshold
        self._n_experts = n_experts
        self._enabled = n_layers * n_experts * n_experts <= _MOST_COUNTS
        shape = (n_layers, n_experts, n_experts) if self._enabled else (0, 0, 0)
        self._counts = np.zeros(shape, np.float32)
        """[layer, a, b]: b in the layer after `layer`, of tokens that chose a in it."""
        self._total = np.zeros((n_layers, n_experts), np.float32)
        self._frequency = np.zeros((n_layers, n_experts))
        self._tokens = [0] * n_layers
        self._last: tuple[int, Any] | None = None
        self._guess: tuple[int, list[int]] | None = None
        self.guessed = 0
        """Guesses scored since the start; `correct` of them were right, and `wanted` is what there was to guess."""
        self.correct = 0
        self.wanted = 0
        self._recent_guessed = self._recent_correct = 0.0

    @property
    def active(self) -> bool:
        """Whether guesses of late were right often enough to act on."""
        return self._recent_guessed >= _LEAST_SCORED and self.precision >= self.threshold

    @property
    def precision(self) -> float:
        """Share of guesses of late that were right; 0 before the first."""
        return self._recent_correct / self._recent_guessed if self._recent_guessed else 0.0

    @property
    def recall(self) -> float:
        """Share of what there was to guess that was guessed, since the start."""
        return self.correct / self.wanted if self.wanted else 0.0

    def observe(self, layer: int, ids: Sequence[int]) -> None:
        """A decoded token chose the indices `ids` in `layer`: scores the guess for it and learns. Prompts are not for
        it: there whole layers are read."""
        self._score(layer, ids)
        if not self._enabled:
            return
        used = np.array(ids, np.intp)
        if self._last is not None:
            before, chosen = self._last
            if before < layer:
                counts = self._counts[before]
                counts[chosen[:, None], used] += 1.0
                self._total[before][chosen] += 1.0
                self._tokens[before] += 1
                if self._tokens[before] % _HALVE_AFTER == 0:
                    counts *= 0.5
                    self._total[before] *= 0.5
        frequency = self._frequency[layer]
        frequency *= _DECAY
        frequency[used] += 1.0 - _DECAY
        self._last = (layer, used)

    def propose(self, layer: int, upcoming: int) -> list[int]:
        """Expert ids of layer `upcoming`, the likeliest first, where `layer` was observed just now; nothing while
        guesses are not worth it."""
        if not self._enabled or self._last is None or self._last[0] != layer:
            return []
        used = self._last[1]
        weight = 1.0 / (self._total[layer][used] + _PRIOR)
        chances = weight @ self._counts[layer][used]
        chances += self._frequency[upcoming] * (_PRIOR * float(weight.sum()))
        order = np.argsort(-chances.astype(np.float32), kind="stable")[: self.most]
        guess = [int(i) for i in order if chances[i] > 0.0]
        self._guess = (upcoming, guess)
        base = upcoming * self._n_experts
        return [base + i for i in guess] if self.active else []

    def _score(self, layer: int, ids: Sequence[int]) -> None:
        if self._guess is None:
            return
        upcoming, guess = self._guess
        self._guess = None
        if upcoming != layer:
            return
        right = len(set(guess).intersection(ids))
        self.guessed += len(guess)
        self.correct += right
        self.wanted += len(ids)
        self._recent_guessed = self._recent_guessed * _FADE + len(guess)
        self._recent_correct = self._recent_correct * _FADE + right
