"""The service's counters as the plain data that telemetry renders. Reads only; a scrape never touches the engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from expertd import __version__
from expertd.runtime.service import Service
from expertd.runtime.session import Session
from expertd.runtime.stats import Histogram
from expertd.telemetry.snapshot import (
    CacheFacts,
    HistogramData,
    ModelFacts,
    PagerFacts,
    ProfileFacts,
    RequestFacts,
    Snapshot,
)


def snapshot(service: Service, http: Mapping[tuple[str, int], int]) -> Snapshot:
    """Everything at this moment. `http` counts answers by route and status."""
    session = service.session
    tap = session.tap.counters if session and session.tap else None
    return Snapshot(
        version=__version__,
        llama_cpp=_llama_cpp(),
        state=service.state,
        ready=service.state == "ready",
        steering=service.steering is not None,
        model=_model(session) if session else None,
        load_seconds=session.model.load_seconds if session else 0.0,
        warm_target_nbytes=service.warm_target_nbytes,
        warm_done_nbytes=service.warm_done_nbytes,
        kv_nbytes=session.kv_nbytes if session else 0,
        cache=_cache(service),
        pager=_pager(service),
        profiles=_profiles(service),
        requests=_requests(service, http),
        tap_seconds=tap.seconds if tap else 0.0,
        routes=tap.routes if tap else 0,
        routes_dropped=tap.dropped_ids if tap else 0,
    )


@cache
def _llama_cpp() -> str:
    """Kept: looking it up parses the package's metadata, a quarter of what a scrape costs."""
    return version("llama-cpp-python")


def _model(session: Session) -> ModelFacts:
    info = session.info
    return ModelFacts(
        id=info.id,
        architecture=info.arch,
        fingerprint=info.fingerprint,
        n_layers=info.n_layers,
        n_experts=info.n_experts,
        n_experts_used=info.n_experts_used,
        expert_nbytes=info.expert_nbytes,
        dense_nbytes=info.dense_nbytes,
        token_nbytes=info.token_nbytes,
    )


def _cache(service: Service) -> CacheFacts:
    steering = service.steering
    if steering is None:
        return CacheFacts()
    session, layers = service.session, [m.layer for m in steering.layout.layers]

    def look(cache: Any) -> CacheFacts:
        c, states = cache.counters, cache.states()
        return CacheFacts(
            requests=c.requests,
            hits=c.hits,
            request_nbytes=c.request_bytes,
            hit_nbytes=c.hit_bytes,
            prompt_requests=c.prompt_requests,
            prompt_hits=c.prompt_hits,
            layers=layers,
            layer_hits=[c.layer_hits[layer] for layer in layers],
            layer_misses=[c.layer_misses[layer] for layer in layers],
            admissions=dict(c.admissions),
            evictions=dict(c.evictions),
            capacity_nbytes=cache.budget_bytes,
            budget_auto=session is None or session.fixed_budget_bytes is None,
            resident_nbytes=cache.resident_bytes,
            pinned_nbytes=cache.pinned_bytes,
            resident_experts=len(states) - states.count(0),
            pinned_experts=states.count(2),
            auto_pinned=service.stats.auto_pinned,
            auto_unpinned=service.stats.auto_unpinned,
            predicted_used=c.predicted_used,
            predicted_wasted=c.predicted_wasted,
            predicted_dropped=steering.worker.counters.prefetch_dropped,
            shadow_requests=cache.shadow_requests,
            shadow_hits=cache.shadow_hits,
            policy_switches=cache.policy_switches,
        )

    facts: CacheFacts = steering.read(look)
    return facts


def _pager(service: Service) -> PagerFacts:
    steering = service.steering
    unreadable = service.session.guard.mended if service.session is not None else 0
    if steering is None:
        return PagerFacts(io_errors={"read": unreadable})
    c = steering.pager.counters
    return PagerFacts(
        fetch_seconds=_histogram(service.stats.fetch_seconds),
        fetch_nbytes=c.fetch_bytes,
        wait_seconds=(c.fetch_ns + c.wait_ns) / 1e9,
        io_errors={
            "fetch": steering.pager.fetch_errors,
            "evict": c.evict_errors,
            "wait": c.wait_errors,
            "read": unreadable,
        },
        pin_failures=dict(c.lock_errors),
    )


def _profiles(service: Service) -> ProfileFacts:
    profiles = service.profiles
    if profiles is None:
        return ProfileFacts()
    return ProfileFacts(profiles.saves, profiles.save_failures, profiles.saved_at)


def _requests(service: Service, http: Mapping[tuple[str, int], int]) -> RequestFacts:
    s = service.stats
    return RequestFacts(
        http=http,
        in_flight=1 if service.running else 0,
        queued=service.queued,
        time_to_first_token=_histogram(s.first_token_seconds),
        inter_token=_histogram(s.inter_token_seconds),
        duration=_histogram(s.request_seconds),
        prompt_tokens=s.prompt_tokens,
        cached_prompt_tokens=s.cached_prompt_tokens,
        generated_tokens=s.generated_tokens,
        prompt_seconds=s.prompt_seconds,
        generation_seconds=s.generation_seconds,
        queue_seconds=s.queue_seconds,
    )


def _histogram(h: Histogram) -> HistogramData:
    return HistogramData(bounds=h.bounds, counts=list(h.counts), total=h.total)
