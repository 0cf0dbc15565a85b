"""Conversations kept for reuse: which tokens are in the context now, and saved states of others within a byte bound.

A request reuses the longest common prefix of its prompt with the running conversation or with a saved one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from expertd.engine.context import Context
from expertd.units import format_size

log = logging.getLogger("expertd.engine")

_MIN_SAVED_TOKENS = 16
"""Shorter conversations are cheaper to compute again than to keep."""


@dataclass
class ReuseCounters:
    saved: int = 0
    restored: int = 0
    dropped: int = 0
    reused_tokens: int = 0


class Conversations:
    """Owned by the engine thread. `nbytes` never exceeds `limit_nbytes`."""

    def __init__(self, context: Context, limit_nbytes: int) -> None:
        self._context, self._limit = context, limit_nbytes
        self.tokens: list[int] = []
        """Tokens whose state is in the context."""
        self._saved: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self.nbytes = 0
        self.counters = ReuseCounters()

    def __len__(self) -> int:
        return len(self._saved)

    def take(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Makes the context hold a prefix of `prompt`, at most all but its last token. Returns its length."""
        longest = len(prompt) - 1
        if not reuse:
            self._save_current()
            return self._cut(0)
        here = min(common_prefix(self.tokens, prompt), longest)
        usable = 0 if self._context.model.recurrent and here < len(self.tokens) else here
        best = self._best_saved(prompt)
        if best is not None and common_prefix(best, prompt) > usable:
            # Taken out first: making room for the current one may drop any that is saved.
            state = self._saved.pop(best)
            self.nbytes -= len(state)
            self._save_current()
            if self._restored(state):
                self.counters.restored += 1
                self.tokens = list(best)
                usable = min(common_prefix(best, prompt), longest)
            else:
                self.tokens, usable = [], 0
        elif usable < len(self.tokens) // 2:
            self._save_current()
        kept = self._cut(usable)
        self.counters.reused_tokens += kept
        return kept

    def extend(self, tokens: Sequence[int]) -> None:
        """The context now also holds these."""
        self.tokens += tokens

    def undo(self) -> None:
        """A decode failed or was cancelled: whatever it left in the context beyond `tokens` goes."""
        del self.tokens[self._context.keep(len(self.tokens)) :]

    def forget(self) -> None:
        """Drops all, the running conversation included."""
        self._saved.clear()
        self.nbytes = 0
        self._cut(0)

    def _cut(self, n_tokens: int) -> int:
        kept = n_tokens if n_tokens == len(self.tokens) else self._context.keep(n_tokens)
        del self.tokens[kept:]
        return kept

    def _restored(self, state: bytes) -> bool:
        """False, with the context empty, where llama.cpp refuses it or there is no memory for it."""
        try:
            return self._context.restore(state)
        except MemoryError:
            log.warning("memory is short: a kept conversation is computed anew (%s)", format_size(len(state)))
            return False

    def _best_saved(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """The saved conversation that shares most with the prompt; wholly contained ones only where cutting is not
        possible."""
        best, longest = None, 0
        for tokens in self._saved:
            n = common_prefix(tokens, prompt)
            if n > longest and (not self._context.model.recurrent or n == len(tokens) < len(prompt)):
                best, longest = tokens, n
        return best

    def _save_current(self) -> None:
        if len(self.tokens) < _MIN_SAVED_TOKENS or not self._limit:
            return
        need = self._context.state_nbytes()
        if need > self._limit:
            return
        key = tuple(self.tokens)
        old = self._saved.pop(key, None)
        self.nbytes -= len(old) if old is not None else 0
        while self.nbytes + need > self._limit:
            _, dropped = self._saved.popitem(last=False)
            self.nbytes -= len(dropped)
            self.counters.dropped += 1
        try:
            state = self._context.save()
        except MemoryError:
            self.counters.dropped += 1
            log.warning("memory is short: a conversation of %d tokens is not kept (%s)", len(key), format_size(need))
            return
        self._saved[key] = state
        self.nbytes += len(state)
        self.counters.saved += 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two series share."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
