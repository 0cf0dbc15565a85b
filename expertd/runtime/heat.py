"""The expert cache as a picture: which expert is hot, resident, just missed. For who looks on, never for a decision.

The cache's lock is held only while the states are copied; scores are read beside it, so one that moves meanwhile may be
a token old. Ranks are worked out at most twice a second, however many look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertd.runtime.steering import Steering

STATES = ("absent", "resident", "pinned", "missed")
"""By the number that stands for them. "missed" is an expert that had to be read in the last few tokens."""
_PINNED, _MISSED = 2, 3
_HOTTEST = 63
_KEEP_SECONDS = 0.5
NOTHING: Mapping[str, Any] = {"layers": [], "n_experts": 0, "scores": [], "state": []}
"""The map where nothing is steered."""


@dataclass(frozen=True, slots=True)
class Cells:
    """One byte an expert, layer by layer: two bits of state above six bits of heat. Heat goes by rank: up to 63 for the
    hottest, 1 for the coldest that was ever used, 0 for never used; equals share the middle of their ranks. `version`
    changes when any cell may have."""

    layers: Sequence[int]
    n_experts: int
    body: bytes
    version: str


@dataclass(frozen=True, slots=True)
class _Ranking:
    """numpy arrays by expert id. `hotter` and `colder` count used experts above and below; `used` ones have a score, or
    were routed to so lately that the policy has not counted it yet."""

    at: float
    scores: Any
    used: Any
    order: Any
    hotter: Any
    colder: Any
    n_used: int


class Heat:
    """Looks at one steering. Lives on the event loop."""

    def __init__(self, steering: Steering) -> None:
        import numpy as np

        self._np, self._steering = np, steering
        layout = steering.layout
        self._layers = [m.layer for m in layout.layers]
        n = layout.n_experts
        self._ids = np.concatenate([np.arange(layer * n, (layer + 1) * n) for layer in self._layers])
        self._born = time.time_ns()
        self._ranking: _Ranking | None = None
        self._cells: Cells | None = None

    def version(self) -> str:
        """Costs next to nothing; equal as long as every cell is what it was."""
        cache, recency = self._steering.cache, self._steering.recency
        counters, now = cache.counters, time.monotonic()
        fades = int(now * 2) if recency.fresh_since(now) else 0
        moved = sum(counters.admissions.values()) + sum(counters.evictions.values())
        return f"{self._born:x}-{counters.requests:x}-{moved:x}-{cache.pinned_bytes:x}-{fades:x}"

    def cells(self) -> Cells:
        """The whole map."""
        version = self.version()
        if self._cells is None or self._cells.version != version:
            np, ranking = self._np, self._rank()
            shares = 0.5 + (ranking.colder - ranking.hotter) / (2 * max(1, ranking.n_used))
            heat = np.where(ranking.used, np.clip(np.round(shares * _HOTTEST), 1, _HOTTEST), 0).astype(np.uint8)
            body = (self._states() << 6 | heat)[self._ids].tobytes()
            self._cells = Cells(self._layers, self._steering.layout.n_experts, body, version)
        return self._cells

    def document(self) -> dict[str, Any]:
        """Scores by layer and expert (0 to 1, of the hottest), and states by number (see `STATES`)."""
        np, ranking, n = self._np, self._rank(), self._steering.layout.n_experts
        top = float(ranking.scores.max(initial=0.0)) or 1.0
        return {
            "layers": self._layers,
            "n_experts": n,
            "scores": np.round(ranking.scores[self._ids] / top, 4).reshape(-1, n).tolist(),
            "state": self._states()[self._ids].reshape(-1, n).tolist(),
        }

    def experts(self, *, layer: int | None = None, expert: int | None = None, limit: int = 50) -> dict[str, Any]:
        """Single experts, hottest first: of one layer or of all, one index or all, at most `limit`."""
        layout, ranking, states = self._steering.layout, self._rank(), self._states()
        n, sizes = layout.n_experts, layout.expert_sizes
        found = (
            e for e in map(int, ranking.order)
            if sizes[e] and (layer is None or e // n == layer) and (expert is None or e % n == expert)
        )  # fmt: skip
        rows = [self._row(e, ranking, states) for e, _ in zip(found, range(limit), strict=False)]
        return {"total": sum(1 for s in sizes if s), "used": ranking.n_used, "experts": rows}

    def _row(self, e: int, ranking: _Ranking, states: Any) -> dict[str, Any]:
        """`rank` counts from 1; None for an expert that was never used."""
        layout, recency, now = self._steering.layout, self._steering.recency, time.monotonic()
        top = float(ranking.scores.max(initial=0.0)) or 1.0
        return {
            "layer": e // layout.n_experts,
            "expert": e % layout.n_experts,
            "rank": int(ranking.hotter[e]) + 1 if ranking.used[e] else None,
            "score": round(float(ranking.scores[e]) / top, 6),
            "state": STATES[int(states[e])],
            "bytes": layout.expert_sizes[e],
            "used_seconds_ago": _ago(recency.used[e], now),
            "missed_seconds_ago": _ago(recency.missed[e], now),
        }

    def _rank(self) -> _Ranking:
        now, np = time.monotonic(), self._np
        if self._ranking is None or now - self._ranking.at > _KEEP_SECONDS:
            # Single precision: what differs beyond it differs by rounding, and would rank layers by their number.
            scores = np.asarray(self._steering.cache.scores(), np.float32)
            order = np.argsort(-scores, kind="stable")
            ascending = scores[order[::-1]]
            used = (scores > 0) | (np.asarray(self._steering.recency.used) > 0)
            n_used = int(used.sum())
            hotter = len(scores) - np.searchsorted(ascending, scores, side="right")
            colder = np.searchsorted(ascending, scores, side="left") - (len(scores) - n_used)
            self._ranking = _Ranking(now, scores, used, order, hotter, colder, n_used)
        return self._ranking

    def _states(self) -> Any:
        """By expert id; a copy that may be written to."""
        np = self._np
        states = np.frombuffer(self._steering.read(lambda cache: cache.states()), np.uint8).copy()
        if since := self._steering.recency.fresh_since(time.monotonic()):
            missed = np.asarray(self._steering.recency.missed) >= since
            states[missed & (states < _PINNED)] = _MISSED
        return states


def _ago(at: float, now: float) -> float | None:
    return round(max(0.0, now - at), 1) if at else None
