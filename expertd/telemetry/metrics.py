"""Every metric: name, kind, help, labels and how it is read from a scrape's data. `docs/metrics.md` explains them.

No label names an expert: 6,144 series would cost 50 ms a scrape; the heat map goes over JSON. No rates and no ratios:
both halves are counters. `collector` turns the table into Prometheus families.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from expertd.telemetry.readings import Readings
from expertd.telemetry.snapshot import CacheFacts, HistogramData, PagerFacts, RequestFacts, Snapshot
from expertd.telemetry.verdict import CAUSES, Verdict


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape renders."""

    daemon: Snapshot
    kernel: Readings
    verdict: Verdict

    @property
    def cache(self) -> CacheFacts:
        return self.daemon.cache

    @property
    def pager(self) -> PagerFacts:
        return self.daemon.pager

    @property
    def requests(self) -> RequestFacts:
        return self.daemon.requests


Sample = tuple[tuple[str, ...], float]
"""Label values in the metric's order, and the value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`kind` is counter, gauge or histogram; a counter's `name` ends in _total. `samples` reads a counter or a gauge,
    `histogram` a histogram."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    samples: Callable[[Scrape], Iterable[Sample]] | None = None
    histogram: Callable[[Scrape], HistogramData] | None = None


Samples = Callable[[Scrape], Iterable[Sample]]
Number = Callable[[Scrape], float]


def _counter(name: str, help_: str, read: Number) -> Metric:
    return Metric(name, "counter", help_, (), lambda scrape: (((), read(scrape)),))


def _gauge(name: str, help_: str, read: Number) -> Metric:
    return Metric(name, "gauge", help_, (), lambda scrape: (((), read(scrape)),))


def _histogram(name: str, help_: str, read: Callable[[Scrape], HistogramData]) -> Metric:
    return Metric(name, "histogram", help_, (), None, read)


def _counters(name: str, help_: str, label: str, samples: Samples) -> Metric:
    return Metric(name, "counter", help_, (label,), samples)


def _gauges(name: str, help_: str, label: str, samples: Samples) -> Metric:
    return Metric(name, "gauge", help_, (label,), samples)


def _by(read: Callable[[Scrape], Mapping[str, int]], *always: str) -> Samples:
    """One sample a key; those in `always` stand from the first scrape, so that a rate over them has a beginning."""

    def samples(scrape: Scrape) -> Iterable[Sample]:
        found = dict.fromkeys(always, 0) | dict(read(scrape))
        return [((key,), value) for key, value in found.items()]

    return samples


def _each(**reads: Number) -> Samples:
    """One sample for each of a fixed set of label values."""
    return lambda scrape: [((value,), read(scrape)) for value, read in reads.items()]


def _build(scrape: Scrape) -> Iterable[Sample]:
    return [((scrape.daemon.version, scrape.daemon.llama_cpp, platform.python_version()), 1)]


def _model(scrape: Scrape) -> Iterable[Sample]:
    m = scrape.daemon.model
    if m is None:
        return []
    return [((m.id, m.architecture, m.fingerprint, str(m.n_layers), str(m.n_experts), str(m.n_experts_used)), 1)]


def _model_nbytes(scrape: Scrape) -> tuple[int, int]:
    """Bytes of experts and of dense weights; 0 before the load."""
    m = scrape.daemon.model
    return (m.expert_nbytes, m.dense_nbytes) if m else (0, 0)


def _layers(scrape: Scrape) -> Iterable[Sample]:
    cache = scrape.daemon.cache
    for layer, hits, misses in zip(cache.layers, cache.layer_hits, cache.layer_misses, strict=True):
        yield (str(layer), "hit"), hits
        yield (str(layer), "miss"), misses


def _http(scrape: Scrape) -> Iterable[Sample]:
    return [((route, str(code)), count) for (route, code), count in list(scrape.daemon.requests.http.items())]


def _bottleneck(scrape: Scrape) -> Iterable[Sample]:
    return [((cause,), float(cause == scrape.verdict.cause)) for cause in CAUSES]


def _stalls(scrape: Scrape) -> Iterable[Sample]:
    found = (("some", scrape.kernel.stall_some_seconds), ("full", scrape.kernel.stall_full_seconds))
    return [((kind,), seconds) for kind, seconds in found if seconds is not None]


def _saved_at(scrape: Scrape) -> Iterable[Sample]:
    at = scrape.daemon.profiles.saved_at
    return [] if at is None else [((), at)]


_BUILD_LABELS = ("version", "llama_cpp", "python")
_MODEL_LABELS = ("model", "architecture", "fingerprint", "layers", "experts", "experts_used")

_IDENTITY = (
    Metric("expertd_build_info", "gauge", "1; the versions are labels.", _BUILD_LABELS, _build),
    Metric("expertd_model_info", "gauge", "1 while a model is loaded; what it is are labels.", _MODEL_LABELS, _model),
    _gauge(
        "expertd_ready", "1 when the model is loaded and the configured warm level reached.", lambda s: s.daemon.ready
    ),
    _gauge(
        "expertd_steering",
        "1 while experts are steered, 0 while the kernel is left alone.",
        lambda s: s.daemon.steering,
    ),
    _gauge("expertd_model_load_seconds", "Time the load took.", lambda s: s.daemon.load_seconds),
    _gauge("expertd_model_expert_bytes", "Bytes of all experts of the model.", lambda s: _model_nbytes(s)[0]),
    _gauge("expertd_model_dense_bytes", "Bytes of the weights that every token uses.", lambda s: _model_nbytes(s)[1]),
    _gauge("expertd_kv_cache_bytes", "Bytes of the KV cache.", lambda s: s.daemon.kv_nbytes),
    _gauge(
        "expertd_warmup_target_bytes", "Bytes the last warm-up was to bring in.", lambda s: s.daemon.warm_target_nbytes
    ),
    _gauge("expertd_warmup_done_bytes", "Bytes the last warm-up has brought in.", lambda s: s.daemon.warm_done_nbytes),
)

_CACHE = (
    _counters(
        "expertd_cache_requests_total",
        "Experts that a layer wanted for a token (in a prompt: for a batch), by whether they were resident.",
        "result",
        _each(hit=lambda s: s.cache.hits, miss=lambda s: s.cache.requests - s.cache.hits),
    ),
    _counters(
        "expertd_cache_request_bytes_total",
        "The same in bytes of experts.",
        "result",
        _each(hit=lambda s: s.cache.hit_nbytes, miss=lambda s: s.cache.request_nbytes - s.cache.hit_nbytes),
    ),
    _counters(
        "expertd_cache_prompt_requests_total",
        "Those of expertd_cache_requests_total that belong to prompts.",
        "result",
        _each(hit=lambda s: s.cache.prompt_hits, miss=lambda s: s.cache.prompt_requests - s.cache.prompt_hits),
    ),
    Metric(
        "expertd_cache_layer_requests_total",
        "counter",
        "Experts wanted, by layer and by whether they were resident.",
        ("layer", "result"),
        _layers,
    ),
    _counters(
        "expertd_cache_admissions_total",
        "Experts taken in, by what brought them.",
        "cause",
        _by(lambda s: s.cache.admissions),
    ),
    _counters(
        "expertd_cache_evictions_total",
        "Experts given up, by what made them go; dropped are those that the kernel took.",
        "cause",
        _by(lambda s: s.cache.evictions, "dropped"),
    ),
    _gauge(
        "expertd_cache_capacity_bytes",
        "The budget: bytes of experts that may be held.",
        lambda s: s.cache.capacity_nbytes,
    ),
    _gauges(
        "expertd_cache_bytes",
        "Bytes of experts resident, and of these pinned.",
        "state",
        _each(resident=lambda s: s.cache.resident_nbytes, pinned=lambda s: s.cache.pinned_nbytes),
    ),
    _gauges(
        "expertd_cache_experts",
        "Experts resident, and of these pinned.",
        "state",
        _each(resident=lambda s: s.cache.resident_experts, pinned=lambda s: s.cache.pinned_experts),
    ),
    _counters(
        "expertd_auto_pins_total",
        "Experts of the stable hot core that the daemon pinned by itself, and those of them it gave up again.",
        "change",
        _each(pinned=lambda s: s.cache.auto_pinned, unpinned=lambda s: s.cache.auto_unpinned),
    ),
    _counters(
        "expertd_prefetch_experts_total",
        "Experts fetched on a prediction: used before they went, wasted, or dropped from the queue unread.",
        "outcome",
        _each(
            used=lambda s: s.cache.predicted_used,
            wasted=lambda s: s.cache.predicted_wasted,
            dropped=lambda s: s.cache.predicted_dropped,
        ),
    ),
    _counter(
        "expertd_cache_shadow_requests_total",
        "Experts wanted in the sampled layers, as each shadow cache of the policy auto saw them.",
        lambda s: s.cache.shadow_requests,
    ),
    _counters(
        "expertd_cache_shadow_hits_total",
        "Those that a shadow cache under another policy would have hit.",
        "policy",
        _by(lambda s: s.cache.shadow_hits),
    ),
    _counter(
        "expertd_cache_policy_switches_total",
        "Times that the policy auto moved to another policy.",
        lambda s: s.cache.policy_switches,
    ),
    _counter("expertd_routes_total", "Routes read: one a layer and token.", lambda s: s.daemon.routes),
    _counter(
        "expertd_routes_dropped_total", "Ids dropped: the model has no such expert.", lambda s: s.daemon.routes_dropped
    ),
    _counter("expertd_tap_seconds_total", "Time spent reading routes and deciding.", lambda s: s.daemon.tap_seconds),
)

_PAGES = (
    _histogram(
        "expertd_fetch_seconds", "Time to ask the kernel for a layer's experts.", lambda s: s.pager.fetch_seconds
    ),
    _counter("expertd_fetch_bytes_total", "Bytes of experts asked of the kernel.", lambda s: s.pager.fetch_nbytes),
    _counter(
        "expertd_fetch_wait_seconds_total",
        "Time spent in asking the kernel for experts and in waiting for them.",
        lambda s: s.pager.wait_seconds,
    ),
    _counters(
        "expertd_io_errors_total",
        "Calls that the kernel refused, by operation.",
        "op",
        _by(lambda s: s.pager.io_errors, "fetch", "evict", "wait", "read"),
    ),
    _counters(
        "expertd_pin_failures_total",
        "Ranges that could not be locked: over the limit (RLIMIT_MEMLOCK), out of memory, other.",
        "reason",
        _by(lambda s: s.pager.pin_failures, "limit", "memory", "other"),
    ),
    _gauge("expertd_locked_bytes", "Memory locked, by the kernel's account (VmLck).", lambda s: s.kernel.locked_nbytes),
    _counters(
        "expertd_page_faults_total",
        "Page faults of this process; major ones waited for the disk.",
        "kind",
        _each(major=lambda s: s.kernel.major_faults, minor=lambda s: s.kernel.minor_faults),
    ),
    _counter("expertd_disk_read_bytes_total", "Bytes this process made the disk read.", lambda s: s.kernel.read_nbytes),
    _counter(
        "expertd_refault_bytes_total",
        "Bytes of file pages read again soon after the kernel took them (the cgroup, else the machine).",
        lambda s: s.kernel.refault_nbytes,
    ),
    _counters(
        "expertd_memory_stall_seconds_total",
        "Time in which some or all tasks waited for memory (PSI of the cgroup, else of the machine).",
        "kind",
        _stalls,
    ),
    _gauge(
        "expertd_memory_available_bytes",
        "Memory free or reclaimable now, where it is scarcest: the machine or the tightest cgroup.",
        lambda s: s.kernel.available_nbytes,
    ),
)

_PROFILES = (
    _counter("expertd_profile_saves_total", "Profiles written to the disk.", lambda s: s.daemon.profiles.saves),
    _counter(
        "expertd_profile_save_failures_total",
        "Attempts to write a profile that failed.",
        lambda s: s.daemon.profiles.save_failures,
    ),
    Metric(
        "expertd_profile_last_save_timestamp_seconds",
        "gauge",
        "When a profile was last written, in seconds since 1970.",
        (),
        _saved_at,
    ),
)

_REQUESTS = (
    Metric("expertd_http_requests_total", "counter", "Answers, by route and status code.", ("route", "code"), _http),
    _gauge("expertd_requests_in_flight", "Requests that the engine works for.", lambda s: s.requests.in_flight),
    _gauge("expertd_requests_queued", "Requests that wait their turn.", lambda s: s.requests.queued),
    _counter("expertd_request_queue_seconds_total", "Time that requests waited.", lambda s: s.requests.queue_seconds),
    _histogram(
        "expertd_time_to_first_token_seconds",
        "From the request's arrival to its first token.",
        lambda s: s.requests.time_to_first_token,
    ),
    _histogram("expertd_inter_token_seconds", "Between two tokens of an answer.", lambda s: s.requests.inter_token),
    _histogram("expertd_request_seconds", "From a request's arrival to its end.", lambda s: s.requests.duration),
    _counter("expertd_prompt_tokens_total", "Prompt tokens, reused ones included.", lambda s: s.requests.prompt_tokens),
    _counter(
        "expertd_prompt_cached_tokens_total",
        "Prompt tokens taken over from an earlier request.",
        lambda s: s.requests.cached_prompt_tokens,
    ),
    _counter("expertd_generated_tokens_total", "Tokens generated.", lambda s: s.requests.generated_tokens),
    _counter("expertd_prompt_seconds_total", "Time the engine computed prompts.", lambda s: s.requests.prompt_seconds),
    _counter("expertd_generation_seconds_total", "Time the engine generated.", lambda s: s.requests.generation_seconds),
)

_VERDICT = (
    _gauge(
        "expertd_thrashing",
        "1 while memory is so short that the same pages are read again and again.",
        lambda s: s.verdict.thrashing,
    ),
    _gauges("expertd_bottleneck", "1 for what holds the answers up now, 0 for the others.", "cause", _bottleneck),
)

METRICS: tuple[Metric, ...] = _IDENTITY + _CACHE + _PAGES + _PROFILES + _REQUESTS + _VERDICT
