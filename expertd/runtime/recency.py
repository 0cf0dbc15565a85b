"""When each expert was last used and last missed: for who looks on, never for a decision.

Written by the engine thread: one look at the clock a token and one list slot an expert, so that the token's way stays
short. Read from anywhere without a lock: a slot is one number, and the two lists need not agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

FRESH_SECONDS = 3.0
FRESH_TOKENS = 3
"""A miss counts as "just missed" for so many tokens, and no longer than the seconds above."""


class Recency:
    """`used` and `missed` are monotonic seconds by expert id, 0.0 for never."""

    def __init__(self, n_ids: int) -> None:
        self.used = [0.0] * n_ids
        self.missed = [0.0] * n_ids
        self.last_miss = 0.0
        self._now = time.monotonic()
        self._began = deque([self._now], maxlen=FRESH_TOKENS)

    def begin_token(self) -> None:
        """What follows belongs to a token that begins now."""
        self._now = time.monotonic()
        self._began.append(self._now)

    def note(self, base: int, ids: Iterable[int], missed: Sequence[int]) -> None:
        """The experts `ids` of the layer whose first expert id is `base` were routed to; the expert ids `missed` had
        to be read for it."""
        used, now = self.used, self._now
        for i in ids:
            used[base + i] = now
        if missed:
            self.last_miss = now
            for expert in missed:
                self.missed[expert] = now

    def fresh_since(self, now: float) -> float:
        """The moment from which on a miss is "just missed" at `now`; 0.0 where there is none that young."""
        since = max(now - FRESH_SECONDS, self._began[0])
        return since if self.last_miss >= since else 0.0
