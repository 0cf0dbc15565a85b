"""Replays a recorded trace against a policy and a byte budget: what would have been read.

The cache is the one that steers (`cache.expert_cache`), fed with the recorded routes; it starts empty, and decoding
finds what the prompt left in it. Policies have the names that `cache.policy` knows, and `belady` is the roof: what is
possible for one that knows all routes beforehand.

Pure: reading a file is `runtime.trace_load`'s, the figures' looks `cli.replay`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertd.cache import belady
from expertd.cache.expert_cache import DEFAULT_HALF_LIFE, ExpertCache
from expertd.cache.policy import POLICIES, make_policy
from expertd.cache.trace import LayerRoute, Trace
from expertd.errors import UsageError
from expertd.types import Phase

AUTO, BELADY = "auto", "belady"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one budget. A request is an expert wanted by a layer of a token, or of a prompt's batch."""

    policy: str
    """As it was asked for."""
    in_charge: str
    """What ranked at the end: `auto` says which policy it was on."""
    budget_bytes: int
    requests: int
    hits: int
    bytes_read: int
    layer_requests: tuple[int, ...]
    """By layer number; 0 where a layer does not route."""
    layer_hits: tuple[int, ...]

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.requests if self.requests else 0.0


def policy_names() -> list[str]:
    """Names to compare, the roof last. `cache.policy` has other names for some, which are accepted too."""
    return [AUTO, *POLICIES, BELADY]


def check_policy(name: str) -> None:
    """UsageError where there is no such policy."""
    if name in (AUTO, BELADY):
        return
    try:
        make_policy(name, 1, 1, DEFAULT_HALF_LIFE)
    except UsageError as error:
        raise UsageError(error.message, hint="known are " + ", ".join(policy_names())) from error


def replay(
    trace: Trace, policy: str, budget_bytes: int, phase: Phase | None = None, half_life: float = DEFAULT_HALF_LIFE
) -> Row:
    """All routes go through an empty cache, in their order; those of `phase` are counted (None is both). Same trace,
    same row. Raises UsageError for an unknown policy, StateError where the trace lacks sizes."""
    sizes = trace.sizes()
    tally = _Tally(trace, sizes, phase)
    if policy == BELADY:
        wanted = [[r.layer * trace.n_experts + i for i in sorted(set(r.ids))] for r in trace.routes]
        for r, missing in zip(trace.routes, belady.misses(wanted, sizes, budget_bytes), strict=True):
            tally.count(r, missing)
        return tally.row(policy, BELADY, budget_bytes)
    cache = ExpertCache(sizes, trace.n_experts, budget_bytes, policy, half_life, trace.k)
    for r in trace.routes:
        tally.count(r, cache.route(r.layer, r.ids, r.phase, r.n_tokens).fetch)
    return tally.row(policy, cache.policy_name, budget_bytes)


class _Tally:
    """Counts routes of one phase."""

    def __init__(self, trace: Trace, sizes: Sequence[int], phase: Phase | None) -> None:
        self._sizes, self._phase = sizes, phase
        self._requests, self._hits = [0] * trace.n_layers, [0] * trace.n_layers
        self._bytes_read = 0

    def count(self, route: LayerRoute, read: Sequence[int]) -> None:
        """Of what `route` wanted, the experts `read` were not there."""
        if self._phase is None or route.phase == self._phase:
            n = len(set(route.ids))
            self._requests[route.layer] += n
            self._hits[route.layer] += n - len(read)
            self._bytes_read += sum([self._sizes[e] for e in read])

    def row(self, policy: str, in_charge: str, budget_bytes: int) -> Row:
        requests, hits = tuple(self._requests), tuple(self._hits)
        return Row(policy, in_charge, budget_bytes, sum(requests), sum(hits), self._bytes_read, requests, hits)
