"""What the cache and the queue look like from outside, as JSON-ready dicts. Pure reading; locks for microseconds."""

from __future__ import annotations

import time
from typing import Any

from expertd.cache.expert_cache import ExpertCache
from expertd.runtime.admission import Job
from expertd.runtime.steering import Steering


def cache(steering: Steering | None, why: str) -> dict[str, Any]:
    """`/expertd/cache`. `bytes_read` is what was asked of the disk for experts."""
    if steering is None:
        return {
            "steering": False, "why": why, "budget_bytes": 0, "resident_bytes": 0, "pinned_bytes": 0,
            "experts": {"total": 0, "resident": 0, "pinned": 0}, "requests": 0, "hits": 0, "misses": 0,
            "evictions": 0, "hit_ratio": 0.0, "bytes_read": 0, "policy": "none", "layers": [],
        }  # fmt: skip
    return {"steering": True, "why": why, **steering.read(lambda c: _cache(c, steering))}


def _cache(c: ExpertCache, steering: Steering) -> dict[str, Any]:
    counters, n, states = c.counters, steering.layout.n_experts, c.states()
    layers = []
    for moe in steering.layout.layers:
        first = moe.layer * n
        absent, pinned = (states.count(state, first, first + moe.n_experts) for state in (0, 2))
        hits, misses = counters.layer_hits[moe.layer], counters.layer_misses[moe.layer]
        layers.append(
            {
                "layer": moe.layer,
                "experts": moe.n_experts,
                "resident": moe.n_experts - absent,
                "pinned": pinned,
                "requests": hits + misses,
                "hits": hits,
                "misses": misses,
                "hit_ratio": hits / (hits + misses) if hits + misses else 0.0,
            }
        )
    return {
        "budget_bytes": c.budget_bytes,
        "resident_bytes": c.resident_bytes,
        "pinned_bytes": c.pinned_bytes,
        "experts": {
            "total": sum(m.n_experts for m in steering.layout.layers),
            "resident": len(states) - states.count(0),
            "pinned": states.count(2),
        },
        "requests": counters.requests,
        "hits": counters.hits,
        "misses": counters.misses,
        "evictions": sum(counters.evictions.values()),
        "hit_ratio": counters.hit_ratio,
        "bytes_read": steering.pager.counters.fetch_bytes,
        "policy": c.policy_name,
        "layers": layers,
    }


def slot(job: Job, position: int | None) -> dict[str, Any]:
    """One request: running (`position` None) or waiting."""
    now = time.monotonic()
    return {
        "id": 0,
        "is_processing": position is None,
        "position": 0 if position is None else position,
        "request_id": job.request.request_id,
        "n_prompt_tokens": len(job.request.prompt),
        "n_prompt_done": job.done_prompt,
        "n_decoded": job.n_generated,
        "waiting_seconds": round((job.started_at or now) - job.queued_at, 3),
        "running_seconds": round(now - job.started_at, 3) if job.started_at else 0.0,
    }


def where(job: Job) -> str:
    """How far a request is, in words."""
    total = len(job.request.prompt)
    if job.done_prompt < total:
        return f"{job.done_prompt} of {total} prompt tokens done"
    return f"{job.n_generated} tokens generated"


def idle_slot() -> dict[str, Any]:
    return {"id": 0, "is_processing": False}
