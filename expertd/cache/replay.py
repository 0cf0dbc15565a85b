"""Replays a recorded trace against a policy and a byte budget: what would have been read.

The cache is the one that steers (`cache.expert_cache`), fed with the recorded routes; it starts empty. Policies have
the names that `cache.policy` knows. `belady` is the roof, which no policy that cannot see ahead passes.

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
    """The routes of one phase, or all of them, through an empty cache. Same trace, same row. Raises UsageError for an
    unknown policy, StateError where the trace lacks sizes."""
    routes, sizes = trace.selected(phase), trace.sizes()
    if policy == BELADY:
        return _roof(trace, routes, sizes, budget_bytes)
    cache = ExpertCache(sizes, trace.n_experts, budget_bytes, policy, half_life)
    for r in routes:
        cache.route(r.layer, r.ids, r.phase, r.n_tokens)
    c = cache.counters
    return Row(
        policy=policy,
        in_charge=cache.policy_name,
        budget_bytes=budget_bytes,
        requests=c.requests,
        hits=c.hits,
        bytes_read=c.request_bytes - c.hit_bytes,
        layer_requests=tuple(h + m for h, m in zip(c.layer_hits, c.layer_misses, strict=True)),
        layer_hits=tuple(c.layer_hits),
    )


def _roof(trace: Trace, routes: Sequence[LayerRoute], sizes: Sequence[int], budget_bytes: int) -> Row:
    base = trace.n_experts
    wanted = [sorted({r.layer * base + i for i in r.ids}) for r in routes]
    missed = belady.misses(wanted, sizes, budget_bytes)
    requests, hits = [0] * trace.n_layers, [0] * trace.n_layers
    for r, experts, missing in zip(routes, wanted, missed, strict=True):
        requests[r.layer] += len(experts)
        hits[r.layer] += len(experts) - len(missing)
    return Row(
        policy=BELADY,
        in_charge=BELADY,
        budget_bytes=budget_bytes,
        requests=sum(requests),
        hits=sum(hits),
        bytes_read=sum(sizes[e] for missing in missed for e in missing),
        layer_requests=tuple(requests),
        layer_hits=tuple(hits),
    )
