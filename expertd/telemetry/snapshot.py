"""What the daemon tells of itself at one moment, as plain data: the seam between the service and this floor.

`daemon` fills it from the service, the server and the pager; `collector` renders it, `watch` compares two of them. All
numbers count from the start of the process unless said otherwise; sizes are bytes, times are seconds.
What the kernel knows of the process (faults, bytes read, pressure) is in `readings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HistogramData:
    """`counts[i]` observations at or below `bounds[i]` and above the bound before; the last of `counts`, one more
    than there are bounds, those above all. `total` is the sum of the observed values."""

    bounds: Sequence[float] = ()
    counts: Sequence[int] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The loaded model."""

    id: str
    architecture: str
    fingerprint: str
    n_layers: int
    n_experts: int
    n_experts_used: int
    expert_nbytes: int
    dense_nbytes: int
    token_nbytes: int
    """Expert bytes that one decoded token needs."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The expert cache. `layers` are the layer numbers that `layer_hits` and `layer_misses` belong to."""

    requests: int = 0
    hits: int = 0
    request_nbytes: int = 0
    hit_nbytes: int = 0
    prompt_requests: int = 0
    prompt_hits: int = 0
    layers: Sequence[int] = ()
    layer_hits: Sequence[int] = ()
    layer_misses: Sequence[int] = ()
    admissions: Mapping[str, int] = field(default_factory=dict)
    evictions: Mapping[str, int] = field(default_factory=dict)
    capacity_nbytes: int = 0
    budget_auto: bool = True
    """Whether the capacity follows the machine, and was not set to a number."""
    resident_nbytes: int = 0
    pinned_nbytes: int = 0
    resident_experts: int = 0
    pinned_experts: int = 0
    auto_pinned: int = 0
    auto_unpinned: int = 0
    """Experts that the daemon pinned by itself, and those of them that it gave up again."""
    predicted_used: int = 0
    predicted_wasted: int = 0
    predicted_dropped: int = 0
    shadow_requests: int = 0
    """Requests that each shadow cache saw; `shadow_hits` are theirs by policy, empty where none run."""
    shadow_hits: Mapping[str, int] = field(default_factory=dict)
    policy_switches: int = 0


@dataclass(frozen=True, slots=True)
class PagerFacts:
    """What was asked of the kernel. `io_errors` by operation (fetch, evict, wait, read), `pin_failures` by reason
    (limit, memory, other). `wait_seconds` is the time in which the engine waited for pages it had asked for."""

    fetch_seconds: HistogramData = field(default_factory=HistogramData)
    fetch_nbytes: int = 0
    wait_seconds: float = 0.0
    io_errors: Mapping[str, int] = field(default_factory=dict)
    pin_failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """Hot maps written to the disk, and attempts that failed. `saved_at` is the time of the last success (seconds
    since 1970), None before the first."""

    saves: int = 0
    save_failures: int = 0
    saved_at: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Requests and tokens. `http` counts answers by (route, status). `queue_seconds` is the time that requests waited
    for their turn, `prompt_seconds` and `generation_seconds` that in which the engine worked for them."""

    http: Mapping[tuple[str, int], int] = field(default_factory=dict)
    in_flight: int = 0
    queued: int = 0
    time_to_first_token: HistogramData = field(default_factory=HistogramData)
    inter_token: HistogramData = field(default_factory=HistogramData)
    duration: HistogramData = field(default_factory=HistogramData)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Of `prompt_tokens`, those taken over from an earlier request."""
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it. `state` is the service's word: loading, warming, ready, stopping or failed."""

    version: str = ""
    llama_cpp: str = ""
    state: str = "loading"
    ready: bool = False
    steering: bool = False
    model: ModelFacts | None = None
    load_seconds: float = 0.0
    warm_target_nbytes: int = 0
    warm_done_nbytes: int = 0
    kv_nbytes: int = 0
    cache: CacheFacts = field(default_factory=CacheFacts)
    pager: PagerFacts = field(default_factory=PagerFacts)
    profiles: ProfileFacts = field(default_factory=ProfileFacts)
    requests: RequestFacts = field(default_factory=RequestFacts)
    tap_seconds: float = 0.0
    routes: int = 0
    routes_dropped: int = 0
