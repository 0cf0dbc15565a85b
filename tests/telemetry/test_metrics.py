"""The table of metrics, its rendering, and that code and documentation name the same things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd.cache.counters import ADMISSION_CAUSES, EVICTION_CAUSES, Counters
from expertd.telemetry.collector import ExpertdCollector, Exporter
from expertd.telemetry.metrics import METRICS
from expertd.telemetry.readings import Readings, take
from expertd.telemetry.snapshot import (
    CacheFacts,
    HistogramData,
    ModelFacts,
    PagerFacts,
    ProfileFacts,
    RequestFacts,
    Snapshot,
)
from expertd.telemetry.verdict import CAUSES, Verdict

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
WANTED = re.findall(
    r"\w+",
    """
expertd_build_info expertd_model_info expertd_ready expertd_cache_requests_total expertd_cache_request_bytes_total
expertd_cache_layer_requests_total expertd_cache_admissions_total expertd_cache_evictions_total
expertd_cache_capacity_bytes expertd_cache_bytes expertd_cache_experts expertd_model_expert_bytes expertd_fetch_seconds
expertd_fetch_bytes_total expertd_prefetch_experts_total expertd_io_errors_total expertd_pin_failures_total
expertd_locked_bytes expertd_page_faults_total expertd_disk_read_bytes_total expertd_memory_stall_seconds_total
expertd_thrashing expertd_tap_seconds_total expertd_routes_total expertd_routes_dropped_total
expertd_warmup_target_bytes expertd_warmup_done_bytes expertd_model_load_seconds expertd_http_requests_total
expertd_requests_in_flight expertd_requests_queued expertd_time_to_first_token_seconds expertd_inter_token_seconds
expertd_request_seconds expertd_prompt_tokens_total expertd_generated_tokens_total expertd_prompt_seconds_total
expertd_generation_seconds_total
""",
)

FULL = Snapshot(
    version="1.2.3",
    llama_cpp="0.3.36",
    state="ready",
    ready=True,
    steering=True,
    model=ModelFacts('tiny "moe"\n', "llama", "ab12", 8, 64, 4, 4096, 1024, 128),
    load_seconds=0.5,
    warm_target_nbytes=100,
    warm_done_nbytes=50,
    kv_nbytes=77,
    cache=CacheFacts(
        requests=10,
        hits=7,
        request_nbytes=1000,
        hit_nbytes=700,
        prompt_requests=4,
        prompt_hits=1,
        layers=(1, 3),
        layer_hits=(3, 4),
        layer_misses=(1, 2),
        admissions={"route": 3},
        evictions={"route": 2, "dropped": 1},
        capacity_nbytes=2048,
        resident_nbytes=1024,
        pinned_nbytes=512,
        resident_experts=8,
        pinned_experts=4,
        auto_pinned=6,
        auto_unpinned=2,
        predicted_used=5,
        predicted_wasted=6,
        predicted_dropped=7,
        shadow_requests=40,
        shadow_hits={"hybrid": 30, "lru": 20},
        policy_switches=1,
    ),
    pager=PagerFacts(HistogramData((0.1, 1.0), (2, 3, 1), 4.5), 300, 0.25, {"fetch": 2}, {"limit": 1}),
    profiles=ProfileFacts(3, 2, 1.7e9),
    requests=RequestFacts(
        http={("/v1/models", 200): 3, ("/v1/chat/completions", 429): 1},
        in_flight=1,
        queued=2,
        time_to_first_token=HistogramData((0.5,), (1, 1), 2.0),
        inter_token=HistogramData((0.5,), (9, 0), 1.0),
        duration=HistogramData((0.5,), (0, 2), 8.0),
        prompt_tokens=40,
        cached_prompt_tokens=10,
        generated_tokens=20,
        prompt_seconds=1.5,
        generation_seconds=2.5,
        queue_seconds=0.5,
    ),
    tap_seconds=0.125,
    routes=160,
    routes_dropped=1,
)
KERNEL = Readings(11, 22, 33, 44, 5.5, 6.5, 1.5, 12.5, 7, 8, 9, 10)


def render(
    snapshot: Snapshot, kernel: Readings = KERNEL, verdict: Verdict | None = None
) -> dict[tuple[str, ...], float]:
    verdict = verdict or Verdict("memory", "Memory.", thrashing=True)
    text = Exporter(ExpertdCollector(lambda: snapshot, lambda: verdict, lambda: kernel)).render().decode()
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_number_of_the_snapshot_reaches_its_metric() -> None:
    found = render(FULL)
    expected = {
        ("expertd_build_info", "llama_cpp=0.3.36", "version=1.2.3"): 1,
        ("expertd_ready",): 1,
        ("expertd_steering",): 1,
        ("expertd_model_load_seconds",): 0.5,
        ("expertd_model_expert_bytes",): 4096,
        ("expertd_model_dense_bytes",): 1024,
        ("expertd_kv_cache_bytes",): 77,
        ("expertd_warmup_target_bytes",): 100,
        ("expertd_warmup_done_bytes",): 50,
        ("expertd_cache_requests_total", "result=hit"): 7,
        ("expertd_cache_requests_total", "result=miss"): 3,
        ("expertd_cache_request_bytes_total", "result=miss"): 300,
        ("expertd_cache_prompt_requests_total", "result=miss"): 3,
        ("expertd_cache_layer_requests_total", "layer=3", "result=hit"): 4,
        ("expertd_cache_layer_requests_total", "layer=1", "result=miss"): 1,
        ("expertd_cache_admissions_total", "cause=route"): 3,
        ("expertd_cache_evictions_total", "cause=dropped"): 1,
        ("expertd_cache_capacity_bytes",): 2048,
        ("expertd_cache_bytes", "state=resident"): 1024,
        ("expertd_cache_bytes", "state=pinned"): 512,
        ("expertd_cache_experts", "state=pinned"): 4,
        ("expertd_auto_pins_total", "change=pinned"): 6,
        ("expertd_auto_pins_total", "change=unpinned"): 2,
        ("expertd_prefetch_experts_total", "outcome=used"): 5,
        ("expertd_prefetch_experts_total", "outcome=wasted"): 6,
        ("expertd_prefetch_experts_total", "outcome=dropped"): 7,
        ("expertd_cache_shadow_requests_total",): 40,
        ("expertd_cache_shadow_hits_total", "policy=hybrid"): 30,
        ("expertd_cache_shadow_hits_total", "policy=lru"): 20,
        ("expertd_cache_policy_switches_total",): 1,
        ("expertd_routes_total",): 160,
        ("expertd_routes_dropped_total",): 1,
        ("expertd_tap_seconds_total",): 0.125,
        ("expertd_fetch_seconds_bucket", "le=0.1"): 2,
        ("expertd_fetch_seconds_bucket", "le=1"): 5,
        ("expertd_fetch_seconds_bucket", "le=+Inf"): 6,
        ("expertd_fetch_seconds_count",): 6,
        ("expertd_fetch_seconds_sum",): 4.5,
        ("expertd_fetch_bytes_total",): 300,
        ("expertd_fetch_wait_seconds_total",): 0.25,
        ("expertd_io_errors_total", "op=fetch"): 2,
        ("expertd_io_errors_total", "op=evict"): 0,
        ("expertd_pin_failures_total", "reason=limit"): 1,
        ("expertd_profile_saves_total",): 3,
        ("expertd_profile_save_failures_total",): 2,
        ("expertd_profile_last_save_timestamp_seconds",): 1.7e9,
        ("expertd_locked_bytes",): 44,
        ("expertd_page_faults_total", "kind=major"): 11,
        ("expertd_page_faults_total", "kind=minor"): 22,
        ("expertd_disk_read_bytes_total",): 33,
        ("expertd_refault_bytes_total",): 10,
        ("expertd_memory_stall_seconds_total", "kind=full"): 6.5,
        ("expertd_memory_available_bytes",): 7,
        ("expertd_http_requests_total", "code=429", "route=/v1/chat/completions"): 1,
        ("expertd_requests_in_flight",): 1,
        ("expertd_requests_queued",): 2,
        ("expertd_request_queue_seconds_total",): 0.5,
        ("expertd_time_to_first_token_seconds_sum",): 2,
        ("expertd_inter_token_seconds_count",): 9,
        ("expertd_request_seconds_bucket", "le=0.5"): 0,
        ("expertd_prompt_tokens_total",): 40,
        ("expertd_prompt_cached_tokens_total",): 10,
        ("expertd_generated_tokens_total",): 20,
        ("expertd_prompt_seconds_total",): 1.5,
        ("expertd_generation_seconds_total",): 2.5,
        ("expertd_thrashing",): 1,
        ("expertd_bottleneck", "cause=memory"): 1,
        ("expertd_bottleneck", "cause=compute"): 0,
    }
    got = {
        (name[0], *(label for label in name[1:] if not label.startswith("python="))): value
        for name, value in found.items()
    }
    assert {key: got.get(key) for key in expected} == expected
    covered = {re.sub(r"_(bucket|count|sum)$", "", key[0]) for key in expected} | {"expertd_model_info"}
    assert covered == {m.name for m in METRICS}


def test_labels_are_escaped_and_no_model_means_no_series() -> None:
    info = [k for k in render(FULL) if k[0] == "expertd_model_info"]
    assert info[0][-1] == 'model=tiny "moe"\n'
    empty = render(Snapshot())
    assert not [k for k in empty if k[0] == "expertd_model_info"]
    assert empty[("expertd_model_expert_bytes",)] == 0
    assert not [k for k in empty if "last_save" in k[0]], "a time that is not known is no series"


def test_a_kernel_without_pressure_files_has_no_stall_series() -> None:
    found = render(FULL, Readings())
    assert not [k for k in found if "stall" in k[0]]


def test_the_process_is_described_and_nothing_says_when_it_was_made() -> None:
    names = {k[0] for k in render(FULL)}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= names
    assert not [n for n in names if n.endswith("_created")]


def test_names_follow_prometheus_customs() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"expertd_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert "expert" not in metric.labels
    assert set(WANTED) <= {m.name for m in METRICS}


def test_documentation_and_code_name_the_same_metrics() -> None:
    rows = {
        found[1]: (found[2], re.findall(r"`(\w+)`", found[3]))
        for found in re.finditer(r"^\| `(expertd_\w+)` \| (\w+) \|([^|]*)\|", DOCS, re.MULTILINE)
    }
    assert rows == {m.name: (m.kind, list(m.labels)) for m in METRICS}
    mentioned = set(re.findall(r"expertd_[a-z_]+", DOCS))
    assert mentioned <= set(rows)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("expertd_cache_admissions_total", ADMISSION_CAUSES),
        ("expertd_cache_evictions_total", EVICTION_CAUSES),
        ("expertd_bottleneck", CAUSES),
    ],
)
def test_every_cause_is_documented(metric: str, values: tuple[str, ...]) -> None:
    text = DOCS if metric == "expertd_bottleneck" else next(line for line in DOCS.splitlines() if f"`{metric}`" in line)
    assert set(values) <= set(re.findall(r"`(\w+)`", text))


def test_the_caches_counters_fit_the_snapshot() -> None:
    counters = Counters(layer_hits=[1], layer_misses=[2])
    facts = CacheFacts(
        layers=(0,),
        layer_hits=counters.layer_hits,
        layer_misses=counters.layer_misses,
        admissions=counters.admissions,
        evictions=counters.evictions,
    )
    found = render(Snapshot(cache=facts))
    assert found[("expertd_cache_layer_requests_total", "layer=0", "result=miss")] == 2
    assert len([k for k in found if k[0] == "expertd_cache_evictions_total"]) == len(EVICTION_CAUSES)


def test_readings_are_of_this_process(tmp_path: Path) -> None:
    now = take()
    assert now.minor_faults > 0
    assert now.cpu_seconds > 0
    assert now.cpu_wait_seconds is None or now.cpu_wait_seconds >= 0
    assert 0 < now.available_nbytes <= now.limit_nbytes
    (tmp_path / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 1\n")
    assert take(tmp_path / "io").read_nbytes == 4096
    assert take(tmp_path / "none").read_nbytes == 0
