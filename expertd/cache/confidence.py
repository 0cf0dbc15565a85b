"""Which guesses are worth a read: learned from how guesses of the same sureness turned out.

A guess for an expert that is not resident costs a read at once and saves a wait if it is right. Guesses are sorted by
their margin into bins; each bin keeps a decayed share of right ones, and is acted on while that share is above a
threshold. A bin that is not acted on goes on being scored, so that it can come back: nothing is read for that.

Pure; one thread. The margin comes from `engine.lookahead`, but any number that grows with sureness will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BIN_WIDTH = 0.1
_BINS = 24
_DECAY = 0.99
_PRIOR_RIGHT, _PRIOR_TOTAL = 0.5, 1.0
_LEAST_SEEN = 8.0
THRESHOLD = 0.6


@dataclass(slots=True)
class Confidence:
    """`threshold` is the least share of right guesses that is acted on."""

    threshold: float = THRESHOLD
    right: list[float] = field(default_factory=lambda: [_PRIOR_RIGHT] * _BINS)
    total: list[float] = field(default_factory=lambda: [_PRIOR_TOTAL] * _BINS)
    guessed: int = 0
    correct: int = 0
    _open: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, guesses: Iterable[tuple[int, float]]) -> list[int]:
        """Experts to read now, of (expert, margin) that are not resident. `settle` tells how they turned out."""
        self._open = [(expert, _bin(margin)) for expert, margin in guesses]
        return [expert for expert, number in self._open if self._pays(number)]

    def _pays(self, number: int) -> bool:
        total = self.total[number]
        return total >= _LEAST_SEEN and self.right[number] >= self.threshold * total

    def settle(self, routed: Sequence[int]) -> None:
        """What the router then picked, in the words of `choose`."""
        for expert, number in self._open:
            hit = expert in routed
            self.right[number] = self.right[number] * _DECAY + hit
            self.total[number] = self.total[number] * _DECAY + 1.0
            self.guessed += 1
            self.correct += hit
        self._open = []


def _bin(margin: float) -> int:
    """Margins below 0 (the guess says "not chosen") share the first bin."""
    return 0 if margin <= 0 else min(_BINS - 1, 1 + int(margin / BIN_WIDTH))
