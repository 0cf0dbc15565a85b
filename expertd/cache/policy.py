"""The seam between the expert cache and what ranks its experts, and the table of policies by name.

A policy keeps what it must remember of the routes and names victims; residency, bytes, pins and counters are the
cache's (`cache.expert_cache`). One policy a file in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from expertd.cache.hybrid import HybridPolicy
from expertd.cache.lfu import LfuPolicy
from expertd.cache.lru import LruPolicy
from expertd.cache.sieve import SievePolicy
from expertd.cache.static import StaticPolicy
from expertd.errors import UsageError


class Policy(Protocol):
    """What a policy answers. An `expert` is an expert id (`layer * n_experts + index`).

    Called by the cache alone, in this order for one route: `touch`, then `victim` and `remove` per eviction, then
    `insert` per fetch. `victim` sees only what was inserted and not removed: pinned experts are removed.
    """

    name: str

    def touch(self, layer: int, ids: Sequence[int], n_tokens: int) -> None:
        """The router picked `ids`, indices within `layer`: k of one token (each once), or k of each of a batch's
        `n_tokens` in turn. The sequence is the policy's to keep."""

    def insert(self, expert: int) -> None:
        """`expert` became resident."""

    def remove(self, expert: int) -> None:
        """`expert` is no longer resident, or got pinned."""

    def victim(self, layer: int, held: Container[int]) -> int:
        """The resident expert to give up first, none of `held`, as seen from `layer`; -1 where there is none."""

    def score(self, expert: int) -> float:
        """How hot an expert is, resident or not: comparable between experts, at one time. Changes nothing, and any
        thread may ask: what waits to be worked off may be left out."""

    def scores(self) -> list[float]:
        """`score` by expert id."""

    def load(self, expert: int, score: float) -> None:
        """Start an expert with a score of an earlier run."""


PolicyMaker = Callable[[int, int, float], Policy]

POLICIES: dict[str, PolicyMaker] = {
    "hybrid": HybridPolicy,
    "lfu": LfuPolicy,
    "lru": LruPolicy,
    "sieve": SievePolicy,
    "static": StaticPolicy,
}
_ALIASES = {"lfru": "hybrid"}


def make_policy(name: str, n_layers: int, n_experts: int, half_life: float) -> Policy:
    """A fresh policy. UsageError where the name is unknown."""
    maker = POLICIES.get(_ALIASES.get(name, name))
    if maker is None:
        raise UsageError(f"there is no policy {name!r}", hint="known are auto, " + ", ".join(POLICIES))
    return maker(n_layers, n_experts, half_life)
