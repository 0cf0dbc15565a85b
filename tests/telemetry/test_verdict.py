"""The bottleneck by table and by property, and the watch that takes the windows."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.telemetry.readings import Readings
from expertd.telemetry.snapshot import CacheFacts, HistogramData, ModelFacts, PagerFacts, RequestFacts, Snapshot
from expertd.telemetry.verdict import CAUSES, Window, decide
from expertd.telemetry.watch import TICK_SECONDS, Watch, measure_disk

GIB = 1 << 30
# A 17 GB model with 5 GiB for it: 40 tokens in ten seconds, 82 % hits, 150 MB a token from a 1.7 GB/s disk.
STEADY = Window(
    in_flight=1,
    generated_tokens=40,
    generation_seconds=9.8,
    wait_seconds=2.0,
    requests=15360,
    hits=12600,
    usual_hit_ratio=0.82,
    miss_nbytes=6 * 10**9,
    read_nbytes=6 * 10**9,
    read_since_start_nbytes=60 * 10**9,
    major_faults=4,
    disk_rate=1.7e9,
    read_ahead_kb=128,
    evicted=2700,
    capacity_nbytes=4 * GIB,
    capacity_before_nbytes=4 * GIB,
    resident_nbytes=4 * GIB,
    expert_nbytes=15 * GIB,
    model_nbytes=16 * GIB,
    stall_seconds=0.1,
)
BOUND = replace(
    STEADY, generated_tokens=20, hits=9200, miss_nbytes=12 * 10**9, read_nbytes=12 * 10**9, usual_hit_ratio=0.62
)
PLAIN = Window(
    steering=False,
    in_flight=1,
    generated_tokens=14,
    generation_seconds=9.8,
    read_nbytes=26 * 10**8,
    read_since_start_nbytes=60 * 10**9,
    major_faults=14 * 490,
    disk_rate=0.5e9,
    read_ahead_kb=128,
    expert_nbytes=15 * GIB,
    model_nbytes=16 * GIB,
)


@pytest.mark.parametrize(
    ("window", "cause", "thrashing"),
    [
        (Window(state="loading"), "starting", False),
        (Window(state="warming", in_flight=1), "starting", False),
        (Window(), "idle", False),
        (STEADY, "compute", False),
        (replace(STEADY, prompt_seconds=8.0, generation_seconds=1.8, prompt_tokens=800), "prompt", False),
        (replace(STEADY, queued=3, queue_seconds=30.0), "queue", False),
        (replace(STEADY, queued=3, queue_seconds=3.0), "compute", False),
        (replace(STEADY, cpu_seconds=10.0, cpu_wait_seconds=7.0), "contention", False),
        (replace(STEADY, cpu_seconds=10.0, cpu_wait_seconds=3.0), "compute", False),
        (replace(BOUND, cpu_seconds=10.0, cpu_wait_seconds=7.0), "memory", False),
        (BOUND, "memory", False),
        (replace(BOUND, read_ahead_kb=8192, read_nbytes=41 * 10**9, major_faults=400), "read_ahead", True),
        (replace(BOUND, read_ahead_kb=8192), "memory", False),
        (replace(BOUND, capacity_nbytes=3 * GIB), "pressure", False),
        (replace(BOUND, capacity_nbytes=3 * GIB, budget_auto=False), "memory", False),
        (replace(BOUND, dropped=600, major_faults=4000), "pressure", True),
        (replace(BOUND, stall_seconds=4.0), "pressure", False),
        (replace(BOUND, refault_nbytes=2 * 10**9), "pressure", False),
        (replace(BOUND, refault_nbytes=5 * 10**9, major_faults=900), "pressure", True),
        (replace(PLAIN, read_since_start_nbytes=5 * GIB, refault_nbytes=2 * 10**9), "memory", True),
        (replace(BOUND, swap_grown_nbytes=GIB), "pressure", False),
        (replace(BOUND, evicted=0, resident_nbytes=GIB), "cold", False),
        (
            replace(BOUND, prompt_seconds=9.0, generation_seconds=0.5, prompt_tokens=512, generated_tokens=1),
            "prompt",
            False,
        ),
        (replace(BOUND, prompt_tokens=0, generated_tokens=0, generation_seconds=0.0), "prompt", False),
        (replace(BOUND, usual_hit_ratio=0.85), "topic", False),
        (replace(BOUND, hits=14000), "disk", False),
        (replace(BOUND, capacity_nbytes=15 * GIB, capacity_before_nbytes=15 * GIB), "disk", False),
        (replace(BOUND, disk_rate=150e6), "disk", False),
        (replace(BOUND, hits=2000, usual_hit_ratio=0.14), "memory", False),
        (replace(BOUND, hits=2000, usual_hit_ratio=0.14, read_nbytes=17 * 10**9), "memory", True),
        (PLAIN, "memory", True),
        (replace(PLAIN, read_since_start_nbytes=5 * GIB), "cold", False),
        (replace(PLAIN, read_ahead_kb=8192, generated_tokens=1), "read_ahead", True),
        (replace(PLAIN, swap_grown_nbytes=GIB), "pressure", True),
        (replace(PLAIN, read_nbytes=0, major_faults=0), "compute", False),
    ],
)
def test_the_cause_is_named(window: Window, cause: str, thrashing: bool) -> None:
    verdict = decide(window)
    assert (verdict.cause, verdict.thrashing) == (cause, thrashing)


def test_sentences_have_the_figures_and_the_way_out() -> None:
    assert decide(BOUND).line() == (
        "Memory: 4.0 GiB of 15.0 GiB of experts fit; 72% of the time goes to the disk, 572 MiB a token; 60% of the "
        "experts hit. More memory, a smaller quantisation, or fewer other programs would help."
    )
    read_ahead = decide(replace(BOUND, read_ahead_kb=8192, read_nbytes=41 * 10**9))
    assert "the disk reads 8192 KiB at each fault, 3.4 times what was asked for" in read_ahead.sentence
    assert "read_ahead_kb" in read_ahead.advice
    assert "the budget lost 1.0 GiB" in decide(replace(BOUND, capacity_nbytes=3 * GIB)).sentence
    assert "--steering on" in decide(PLAIN).advice


_counts, _times = st.integers(0, 1 << 40), st.floats(0, 1e6)
windows = st.builds(
    Window,
    seconds=st.floats(0.1, 1e4),
    state=st.sampled_from(["loading", "warming", "ready", "stopping", "failed"]),
    steering=st.booleans(),
    in_flight=st.integers(0, 1),
    queued=st.integers(0, 100),
    prompt_tokens=st.integers(0, 10**6),
    generated_tokens=st.integers(0, 10**6),
    prompt_seconds=_times,
    generation_seconds=_times,
    queue_seconds=_times,
    wait_seconds=_times,
    requests=st.integers(1000, 10**6),
    hits=st.integers(0, 1000),
    usual_hit_ratio=st.none() | st.floats(0, 1),
    miss_nbytes=_counts,
    read_nbytes=_counts,
    read_since_start_nbytes=_counts,
    refault_nbytes=_counts,
    major_faults=st.integers(0, 10**7),
    disk_rate=st.none() | st.floats(1e6, 1e10),
    read_ahead_kb=st.none() | st.sampled_from([0, 128, 4096, 8192]),
    evicted=st.integers(0, 10**6),
    dropped=st.integers(0, 10**6),
    capacity_nbytes=_counts,
    capacity_before_nbytes=_counts,
    resident_nbytes=_counts,
    expert_nbytes=_counts,
    model_nbytes=_counts,
    stall_seconds=st.none() | _times,
    cpu_seconds=_times,
    cpu_wait_seconds=_times,
    swap_grown_nbytes=st.integers(-(1 << 40), 1 << 40),
)


@given(windows)
def test_any_window_has_one_cause_and_whole_sentences(window: Window) -> None:
    verdict = decide(window)
    assert verdict.cause in CAUSES
    assert verdict.sentence.endswith(".")
    assert "\n" not in verdict.line()
    if verdict.cause not in ("starting", "idle"):
        assert verdict.advice.endswith(".")
        assert 0 <= verdict.figures["io_share"] <= 1


@given(windows)
def test_thrashing_needs_a_disk_that_binds(window: Window) -> None:
    verdict = decide(window)
    if verdict.thrashing:
        assert window.io_share >= 0.4
        assert verdict.cause not in ("compute", "queue", "contention", "starting", "idle")


@given(windows.filter(lambda w: w.state == "ready"), st.integers(0, 1 << 40))
def test_more_reading_never_turns_a_disk_bound_window_into_compute(window: Window, more: int) -> None:
    if decide(window).cause not in ("compute", "queue", "contention", "idle", "prompt"):
        more_read = replace(window, read_nbytes=window.read_nbytes + more)
        assert decide(more_read).cause not in ("compute", "queue", "contention")


class Daemon:
    """A daemon that is told what it did, and tells it on."""

    def __init__(self) -> None:
        self.model = ModelFacts("m", "llama", "f", 48, 128, 8, 15 * GIB, GIB, 900 << 20)
        self.state = "loading"
        self.tokens = self.requests = self.hits = self.evicted = self.read = self.faults = 0
        self.seconds = 0.0
        self.capacity = self.resident = 4 * GIB

    def work(self, tokens: int, hit_ratio: float, seconds: float = TICK_SECONDS) -> None:
        asked = tokens * 384
        self.tokens += tokens
        self.requests += asked
        self.hits += round(asked * hit_ratio)
        misses = asked - round(asked * hit_ratio)
        self.evicted += misses
        self.read += misses * (2 << 20)
        self.seconds += seconds

    def snapshot(self) -> Snapshot:
        return Snapshot(
            state=self.state,
            steering=True,
            model=self.model,
            cache=CacheFacts(
                requests=self.requests,
                hits=self.hits,
                request_nbytes=self.requests << 21,
                hit_nbytes=self.hits << 21,
                evictions={"route": self.evicted},
                capacity_nbytes=self.capacity,
                resident_nbytes=self.resident,
            ),
            pager=PagerFacts(),
            requests=RequestFacts(generated_tokens=self.tokens, inter_token=HistogramData(total=self.seconds)),
        )

    def kernel(self) -> Readings:
        return Readings(read_nbytes=self.read, major_faults=self.faults)


def run(daemon: Daemon, watch: Watch, start: float, ticks: int, tokens: int, hit_ratio: float) -> float:
    for _ in range(ticks):
        daemon.work(tokens, hit_ratio)
        start += TICK_SECONDS
        watch.tick(start)
    return start


def test_the_watch_follows_a_daemon(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon()
    watch = Watch(daemon.snapshot, daemon.kernel, read_ahead_kb=lambda: 128)
    watch.disk_rate = 1.7e9
    caplog.set_level(logging.INFO)
    assert watch.verdict.cause == "starting"
    watch.tick(0.0)
    watch.tick(2.0)
    assert watch.verdict.cause == "starting"
    daemon.state = "ready"
    watch.tick(4.0)
    assert watch.verdict.cause == "idle"
    now = run(daemon, watch, 4.0, 30, 6, 0.97)
    assert watch.verdict.cause == "compute"
    now = run(daemon, watch, now, 6, 5, 0.5)
    assert watch.verdict.cause == "topic"
    now = run(daemon, watch, now, 30, 6, 0.97)
    assert watch.verdict.cause == "compute"
    daemon.capacity = daemon.resident = GIB
    now = run(daemon, watch, now, 8, 5, 0.4)
    assert watch.verdict.cause == "pressure"
    for _ in range(8):
        now += TICK_SECONDS
        watch.tick(now)
    assert watch.verdict.cause == "idle"
    assert watch.last_busy is not None
    assert watch.last_busy.cause == "pressure"
    said = [r.getMessage().partition(":")[0] for r in caplog.records if r.name == "expertd.telemetry.watch"]
    assert said == ["Compute", "Topic changed", "Compute", "Pressure"]


def test_one_odd_window_does_not_talk() -> None:
    daemon = Daemon()
    daemon.state = "ready"
    watch = Watch(daemon.snapshot, daemon.kernel)
    watch.disk_rate = 1.7e9
    watch.tick(0.0)
    now = run(daemon, watch, 0.0, 10, 6, 0.97)
    daemon.read += 12 * 10**9
    now = run(daemon, watch, now, 1, 6, 0.97)
    assert watch.verdict.cause == "compute"


def test_a_steady_rate_is_not_taken_for_the_disks_limit() -> None:
    daemon = Daemon()
    daemon.state = "ready"
    watch = Watch(daemon.snapshot, daemon.kernel)
    watch.tick(0.0)
    run(daemon, watch, 0.0, 10, 6, 0.5)
    assert watch.verdict.cause == "compute"


def test_the_disk_is_measured_only_on_files_that_can_tell(tmp_path: Path, demo_model: Path) -> None:
    assert measure_disk(demo_model) is None
    assert measure_disk(tmp_path / "none") is None
    large = tmp_path / "large"
    large.write_bytes(bytes(65 << 20))
    rate = measure_disk(large)
    assert rate is None or rate > 0
