"""Shadow caches: what other policies would hit, on a sample of the layers and with the budget's share of them.

Each is a whole `ExpertCache` that holds no pages, fed with the routes of a few layers spread over the model. All
shadows see the same routes and budget, so their hits compare with each other; with the real cache's they do not quite,
since a sample shares its budget among fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from expertd.types import Phase

_SAMPLED_LAYERS = 4
_FADE = 1.0 - 1.0 / 512
"""Per sampled route: what counts is the last few hundred tokens."""


class Cache(Protocol):
    """What a shadow needs of a cache."""

    def route(self, layer: int, ids: Sequence[int], phase: Phase, n_tokens: int | None) -> object: ...

    def resize(self, budget_bytes: int) -> object: ...


Maker = Callable[[str, Sequence[int], int], Cache]
"""A cache by policy name, sizes by expert id and budget in bytes."""


class Shadows:
    """`names` are policies; `make` builds their caches. One thread, as the cache that owns them."""

    def __init__(
        self, sizes: Sequence[int], n_experts: int, budget_bytes: int, names: Sequence[str], make: Maker
    ) -> None:
        n_layers = len(sizes) // n_experts
        routing = [i for i in range(n_layers) if any(sizes[i * n_experts : (i + 1) * n_experts])]
        n = min(_SAMPLED_LAYERS, len(routing))
        chosen = [routing[(2 * i + 1) * len(routing) // (2 * n)] for i in range(n)]
        self._place = {layer: place for place, layer in enumerate(chosen)}
        sampled = [s for layer in chosen for s in sizes[layer * n_experts : (layer + 1) * n_experts]]
        self._sampled_bytes, self._total_bytes = sum(sampled), sum(sizes)
        share = self._share(budget_bytes)
        self._caches = {name: make(name, sampled, share) for name in names}
        self.requests = 0
        self.hits = dict.fromkeys(names, 0)
        """Since the start, by policy, of `requests` each."""
        self._recent_requests = 0.0
        self._recent = dict.fromkeys(names, 0.0)

    def _share(self, budget_bytes: int) -> int:
        return budget_bytes * self._sampled_bytes // max(1, self._total_bytes)

    def route(self, layer: int, ids: Sequence[int], phase: Phase, n_tokens: int | None) -> None:
        """As the cache's: layers that are not sampled are passed over. Only decoded tokens are counted."""
        place = self._place.get(layer)
        if place is None:
            return
        decoding = phase == Phase.DECODE
        if decoding:
            self.requests += len(ids)
            self._recent_requests = self._recent_requests * _FADE + len(ids)
        for name, cache in self._caches.items():
            hits = int(getattr(cache.route(place, ids, phase, n_tokens), "hits", 0))
            if decoding:
                self.hits[name] += hits
                self._recent[name] = self._recent[name] * _FADE + hits

    def resize(self, budget_bytes: int) -> None:
        for cache in self._caches.values():
            cache.resize(self._share(budget_bytes))

    @property
    def recent_requests(self) -> float:
        """Sampled requests that still count."""
        return self._recent_requests

    def recent(self) -> Mapping[str, float]:
        """Hit ratios of late, by policy; empty before the first sampled token."""
        n = self._recent_requests
        return {name: hits / n for name, hits in self._recent.items()} if n else {}
