"""Joins the router tap, the expert cache and the pager: what was routed is fetched, what must go is dropped.

`routed` runs in the engine thread, inside llama.cpp's callback, once a layer. The cache has one lock, which is held for
the decision and never across a system call. Evictions go to the pager's thread; the engine waits for none of them.

How a layer is handled:
1. Nothing to decide (all its experts are resident, and nothing was evicted lately or the budget holds all there are):
   it is looked at only at every `SAMPLE_TOKENS`th token, for the statistics.
2. Else fetch what is missing, in the order the matmul reads it; ask the cache while the disk works; hand over what must
   go. For a moment there is more than the budget, as there is until evictions are done: the reserve is for that.
3. A layer of a prompt may miss more than the reserve of memory holds: what must go goes in step with what comes, so
   that the kernel has no need to choose for itself.
4. In a prompt that uses nearly all experts of a layer, the next layer's are read ahead while this one computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from expertd.cache.decision import Decision
from expertd.cache.expert_cache import ExpertCache
from expertd.pages.pager import Pager
from expertd.pages.worker import PagerWorker
from expertd.runtime.recency import Recency
from expertd.runtime.stats import Stats
from expertd.types import ExpertLayout, Phase

SAMPLE_TOKENS = 16
_CALM_TOKENS = 64
"""Tokens without an eviction after which whole layers are only sampled."""
_AT_ONCE_NBYTES = 8 << 20
"""Read in a prompt before what must go is gone; the reserve of `pages.budget` is at least this."""
_STREAM_SHARE = 0.85
"""Share of a layer's experts used by one prompt batch from which on the next layer's are read ahead."""
_STREAM_MOST = 0.125
"""Share of the budget that what is read ahead may take."""

Observer = Callable[[int, Sequence[int], Phase], None]


@dataclass(frozen=True, slots=True)
class Usage:
    """The cache's counters at one moment, to subtract for a receipt."""

    requests: int
    hits: int
    fetched_bytes: int


class Steering:
    """Owner of the cache. All methods but `routed` and `want` may be called from any thread."""

    def __init__(
        self, layout: ExpertLayout, cache: ExpertCache, pager: Pager, worker: PagerWorker, stats: Stats
    ) -> None:
        self.layout, self.cache, self.pager, self.worker = layout, cache, pager, worker
        self.observers: list[Observer] = []
        """Told of every route, after it was served (traces, profiles). An exception is the tap's to count."""
        self.serving = False
        """Whether a request is being computed. Set by the engine thread."""
        self.look_at_all = False
        """Whether no layer is only sampled (a trace is recorded)."""
        self.recency = Recency(layout.n_layers * layout.n_experts)
        self.stats = stats
        self._lock = threading.Lock()
        # Not the last one: llama.cpp computes it for the tokens alone whose logits are wanted, of a prompt the last.
        self.next_layer = {m.layer: n.layer for m, n in zip(layout.layers, layout.layers[1:-1], strict=False)}
        self._first_layer = layout.layers[0].layer
        self._most_waiting = {
            m.layer: max(2 * layout.n_experts_used, _AT_ONCE_NBYTES // m.expert_nbytes) for m in layout.layers
        }
        """Evictions that may wait: of two layers of a token, or as many as the reserve holds at least."""
        self._whole = [False] * layout.n_layers
        self._roomy = False
        """Whether the budget holds all experts, so that nothing will be evicted for another."""
        self._token = 0
        self._last_eviction = 0
        self._sampling = False
        self._strays: list[int] = []

    def leave_strays(self, experts: Iterable[int]) -> None:
        """Experts that are in the page cache without being admitted (found at the start, beyond the budget). One of
        them goes for each expert that is fetched, the first of them first, so that the page cache does not grow; they
        go on serving until then."""
        self._strays = list(experts)

    def sweep(self) -> None:
        """Drops the pieces of experts that read-ahead dragged in with the header and the dense weights: of no use to
        anybody, and not in the cache's books. Whole experts that were found stay."""
        with self._lock:
            known = {*self.cache.resident(), *self._strays}
        sizes = self.layout.expert_sizes
        self.worker.evict([e for e, size in enumerate(sizes) if size and e not in known])

    def drop_strays(self, keep: Iterable[int] = ()) -> None:
        """All strays go but those to keep, which are about to be admitted."""
        kept = set(keep)
        with self._lock:
            out = [e for e in self._strays if e not in kept]
            self._strays = [e for e in self._strays if e in kept]
        if out:
            self._evicted(out)

    def want(self, layer: int) -> bool:
        """Whether the tap should stop at this layer of the token that is being computed (case 1)."""
        if layer == self._first_layer:
            self._begin_token()
        return self._sampling or self.look_at_all or not self._whole[layer]

    def _begin_token(self) -> None:
        self._token += 1
        self.recency.begin_token()
        self._sampling = self._token % SAMPLE_TOKENS == 0
        roomy, before = self.cache.budget_bytes >= self.layout.expert_nbytes, self._roomy
        self._roomy = roomy
        if not roomy and self._token - self._last_eviction <= _CALM_TOKENS:
            if any(self._whole):
                self._whole = [False] * len(self._whole)
        elif self._sampling or (roomy and not before):
            with self._lock:
                self._whole = self._whole_layers()

    def _whole_layers(self) -> list[bool]:
        whole = [False] * self.layout.n_layers
        for moe in self.layout.layers:
            base = moe.layer * self.layout.n_experts
            whole[moe.layer] = all(self.cache.is_resident(e) for e in range(base, base + moe.n_experts))
        return whole

    def routed(self, layer: int, ids: list[int], phase: Phase) -> None:
        """The router picked `ids` in `layer` (case 2)."""
        early = self.cache.absent(layer, ids) if phase is Phase.DECODE else []
        if early:
            self._fetch(early)
        with self._lock:
            decision = self.cache.route(layer, ids, phase)
        out = self._strays_for(decision.fetch) + decision.evict if self._strays else decision.evict
        if phase is Phase.PREFILL and decision.fetch:
            out = self._bring_in(layer, decision.fetch, out)
        elif late := [e for e in decision.fetch if e not in early]:
            self._fetch(late)  # another thread dropped it in between
        if out and self._evicted(out) > self._most_waiting[layer]:
            self._drop_now()
        if phase is Phase.PREFILL:
            self._read_ahead(layer, ids, decision)
        self.recency.note(layer * self.layout.n_experts, ids, decision.fetch)
        for observer in self.observers:
            observer(layer, ids, phase)

    def _fetch(self, experts: Sequence[int]) -> None:
        began = time.perf_counter()
        self.pager.fetch(experts)
        self.stats.fetch_seconds.observe(time.perf_counter() - began)

    def _bring_in(self, layer: int, fetch: Sequence[int], out: list[int]) -> list[int]:
        """Fetches (case 3). Returns what is still to go."""
        nbytes = len(fetch) * self.layout.by_layer[layer].expert_nbytes
        if nbytes <= _AT_ONCE_NBYTES or not out:
            self._fetch(fetch)
            return out
        self._last_eviction = self._token
        began = time.perf_counter()
        self.pager.exchange(layer, fetch, out, _AT_ONCE_NBYTES)
        self.stats.fetch_seconds.observe(time.perf_counter() - began)
        self.worker.look_again(out)
        return []

    def _strays_for(self, fetched: Sequence[int]) -> list[int]:
        """As many strays as experts were fetched; those fetched are strays no more."""
        arrived = set(fetched)
        with self._lock:
            left = [e for e in self._strays if e not in arrived]
            n = len(fetched) - (len(self._strays) - len(left))
            self._strays, out = left[max(n, 0) :], left[: max(n, 0)]
        return out

    def _evicted(self, experts: Sequence[int]) -> int:
        self._last_eviction = self._token
        return self.worker.evict(experts)

    def _drop_now(self) -> None:
        """The pager's thread does not keep up (the processors are busy): better a wait here than the kernel's choice
        of what to reclaim."""
        overdue = self.worker.take_evictions()
        self.pager.drop_released(overdue)
        self.worker.look_again(overdue)

    def _read_ahead(self, layer: int, ids: Sequence[int], decision: Decision) -> None:
        """Case 4."""
        upcoming = self.next_layer.get(layer)
        if upcoming is None:
            return
        here, there = self.layout.by_layer[layer], self.layout.by_layer[upcoming]
        if decision.hits + len(decision.fetch) < _STREAM_SHARE * here.n_experts:
            return
        n = self.layout.n_experts
        base = upcoming * n
        with self._lock:
            absent = [e for e in range(base, base + there.n_experts) if not self.cache.is_resident(e)]
            most = int(_STREAM_MOST * self.cache.budget_bytes) // there.expert_nbytes
            ahead = self.cache.expect(absent[:most], {layer * n + i for i in ids})
        if ahead.evict:
            self._evicted(ahead.evict)
        if ahead.fetch:
            self.worker.prefetch(ahead.fetch)

    def act(self, decide: Callable[[ExpertCache], Decision], *, fetch: bool = True) -> Decision:
        """A decision from outside the token's way (resize, admit, pin): decided under the lock, then done by the
        pager's thread. `fetch` False takes the experts as resident already."""
        with self._lock:
            decision = decide(self.cache)
            if self._strays and decision.fetch:
                arrived = set(decision.fetch)
                self._strays = [e for e in self._strays if e not in arrived]
        if decision.unpin:
            self.worker.unpin(decision.unpin)
        if decision.evict:
            self._evicted(decision.evict)
        if decision.fetch:
            if fetch:
                self.worker.prefetch(decision.fetch)
            else:
                self.pager.hold(decision.fetch)
        return decision

    def rank_by(self, scores: Sequence[float]) -> None:
        """From now on experts rank by these scores (by expert id), as if such traffic had been; a 0 changes nothing."""
        with self._lock:
            self.cache.load_scores(scores)

    def read(self, look: Callable[[ExpertCache], Any]) -> Any:
        """Look at the cache under its lock, for microseconds."""
        with self._lock:
            return look(self.cache)

    def evict(self, experts: Iterable[int]) -> list[int]:
        """Evict on request, pinned or not. Returns those that were resident."""
        chosen = list(experts)
        with self._lock:
            pinned = [e for e in chosen if self.cache.is_pinned(e)]
            gone = self.cache.evict(chosen)
        if pinned:
            self.worker.unpin(pinned)
        if gone:
            self._evicted(gone)
        return gone

    def forget(self, experts: Sequence[int]) -> None:
        """The kernel took these pages: they are not resident any more."""
        with self._lock:
            self.cache.drop(experts)
        self.pager.release(experts)

    def unpin(self, experts: Iterable[int] | None) -> list[int]:
        """Unlock pinned experts (all by default); they stay resident. Returns them."""
        with self._lock:
            given_up = self.cache.unpin(experts)
        if given_up:
            self.worker.unpin(given_up)
        return given_up

    def usage(self) -> Usage:
        counters, pager = self.cache.counters, self.pager.counters
        return Usage(counters.requests, counters.hits, pager.fetch_bytes)
