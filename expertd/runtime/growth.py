"""By how much computing will still make the process grow: llama.cpp reserves a buffer for its widest micro-batch, and
takes memory for it only when a micro-batch as wide is computed.

Owned by the engine thread; `left_nbytes` may be asked from any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from expertd.pages import memory


class Growth:
    """`compute(n)` are the bytes of the buffer that a micro-batch of n tokens touches."""

    def __init__(self, compute: Callable[[int], int], n_ubatch: int) -> None:
        self._compute, self._n_ubatch = lru_cache(64)(compute), n_ubatch
        self._widest = 0
        self._due, self._anon = compute(n_ubatch), memory.anon_nbytes()
        self.prompting = False
        """Whether a prompt is being computed."""

    def begins(self, n_tokens: int) -> bool:
        """A prompt of so many tokens is next. Whether it will take memory."""
        width = min(n_tokens, self._n_ubatch)
        touched = self._compute(self._widest) if self._widest else 0
        self._due, self._anon = max(0, self._compute(width) - touched), memory.anon_nbytes()
        self._widest = max(self._widest, width)
        self.prompting = self._due > 0
        return self.prompting

    def over(self) -> None:
        """The prompt is computed: what it took shows."""
        self._due = 0
        self.prompting = False

    def left_nbytes(self) -> int:
        """Before the first prompt, all that computing may take; later what the one that is computed will."""
        return max(0, self._due - max(0, memory.anon_nbytes() - self._anon))
