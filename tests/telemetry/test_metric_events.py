"""Metrics move when what they count happens: events are made on a real service, figures are read from a scrape.

Elsewhere: refused locks (`tests/pages/test_pages_locks.py`, `tests/warm_daemon/test_lock_limit.py`), saves that fail
(`tests/profiles`), ids that the model does not have (`tests/engine/test_tap.py`), prefetches that are given up
(`tests/pages/test_pages_worker.py`), the verdict, stalls and refaults (`tests/telemetry/test_causes.py`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd.daemon.facts import snapshot
from expertd.runtime.selection import Selection
from expertd.runtime.service import Service
from expertd.runtime.warmup import WarmOrder
from expertd.telemetry.collector import ExpertdCollector, Exporter
from expertd.telemetry.watch import Watch
from expertd.types import Extent
from tests.server.conftest import LiveServer, runtime_settings, server_settings

Figures = dict[tuple[str, ...], float]
LONG = {"prompt": "Once upon a time", "max_tokens": -1, "ignore_eos": True, "stream": True}


class Scraped:
    """A running server, and its metrics as Prometheus reads them."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.service = server, server.service
        self.watch = Watch(self._facts)
        self._exporter = Exporter(ExpertdCollector(self._facts, lambda: self.watch.verdict))

    def _facts(self) -> Any:
        return snapshot(self.service, self.server.app.state.context.counts)

    def figures(self) -> Figures:
        return {
            (s.name.removeprefix("expertd_"), *(v for k, v in sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(self._exporter.render().decode())
            for s in family.samples
        }

    def moved(self, event: Callable[[], object]) -> Figures:
        """What each figure grew by; all that did not move are left out."""
        before = self.figures()
        event()
        after = self.figures()
        return {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)}

    def ask(self, prompt: str = "Once upon a time", tokens: int = 24, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        with self.server.client() as http:
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def scraped(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    directory = tmp_path_factory.mktemp("events")
    settings = replace(
        runtime_settings(
            demo_model, budget_share=0.25, pin_budget_share=0.1, state=directory / "state", save_seconds=0.0
        ),
        policy="lru",
    )
    server = LiveServer(Service(settings), server_settings(directory)).start()
    yield Scraped(server)
    server.stop()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_before_the_load_nothing_is_ready(demo_model: Path) -> None:
    service = Service(runtime_settings(demo_model))
    text = Exporter(
        ExpertdCollector(lambda: snapshot(service, {}), lambda: Watch(lambda: snapshot(service, {})).verdict)
    )
    found = text.render().decode()
    assert "expertd_ready 0.0" in found
    assert "expertd_model_info{" not in found


def test_what_runs_is_described(scraped: Scraped, demo_model: Path) -> None:
    found = scraped.figures()
    service = scraped.service
    assert (found["ready",], found["steering",]) == (1, 1)
    model = service.model
    assert found["model_expert_bytes",] == model.expert_nbytes
    assert found["model_dense_bytes",] == model.dense_nbytes
    assert found["model_load_seconds",] > 0
    assert found["kv_cache_bytes",] > 0
    assert found["memory_available_bytes",] > 0
    assert found["cache_capacity_bytes",] == int(0.25 * model.expert_nbytes)
    info = next(k for k in found if k[0] == "model_info")
    assert {model.id, model.arch, model.fingerprint} <= set(info)
    assert any(k[0] == "build_info" for k in found)
    assert Path("/proc/pressure/memory").exists() == any(k[0] == "memory_stall_seconds_total" for k in found)


def test_a_request_moves_the_counts_of_requests_and_tokens(scraped: Scraped) -> None:
    answers: list[dict[str, Any]] = []
    moved = scraped.moved(lambda: answers.append(scraped.ask("The old house by the river was", 24)))
    prompt = answers[0]["usage"]["prompt_tokens"]
    assert moved["http_requests_total", "200", "/v1/completions"] == 1
    assert moved["prompt_tokens_total",] == prompt
    assert moved["generated_tokens_total",] == 24
    assert moved["time_to_first_token_seconds_count",] == 1
    assert moved["inter_token_seconds_count",] == 23
    assert moved["request_seconds_count",] == 1
    assert moved["prompt_seconds_total",] > 0
    assert moved["generation_seconds_total",] > 0
    again = scraped.moved(lambda: scraped.ask("The old house by the river was", 4))
    assert again["prompt_cached_tokens_total",] == prompt - 1
    with scraped.server.client() as http:
        refused = scraped.moved(lambda: http.post("/v1/completions", json={"prompt": "x", "n": 2}))
    assert refused["http_requests_total", "400", "/v1/completions"] == 1
    assert "generated_tokens_total" not in {k[0] for k in refused}


def test_routes_move_the_cache(scraped: Scraped) -> None:
    moved = scraped.moved(lambda: scraped.ask("#include <stdio.h>\nint main(void)\n{", 48, cache_prompt=False))
    for result in ("hit", "miss"):
        assert moved["cache_requests_total", result] > 0
        assert moved["cache_request_bytes_total", result] > 0
        layers = [v for k, v in moved.items() if k[0] == "cache_layer_requests_total" and k[2] == result]
        assert sum(layers) == moved["cache_requests_total", result]
    assert sum(v for k, v in moved.items() if k[0] == "cache_prompt_requests_total") > 0
    assert moved["cache_admissions_total", "route"] + moved["cache_admissions_total", "prompt"] > 0
    assert sum(v for k, v in moved.items() if k[0] == "cache_evictions_total") > 0
    assert moved["routes_total",] >= 48
    assert moved["tap_seconds_total",] > 0
    assert moved["fetch_seconds_count",] > 0
    assert moved["fetch_bytes_total",] > 0
    assert moved["fetch_wait_seconds_total",] > 0
    assert moved["page_faults_total", "minor"] > 0


def test_who_runs_and_who_waits(scraped: Scraped) -> None:
    server, service = scraped.server, scraped.service
    waiting = threading.Thread(target=lambda: scraped.ask("The sea", 2))

    def queue_up() -> None:
        with server.connect() as runs:
            body = json.dumps(LONG).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            runs.sendall(head + body)
            until(lambda: service.running)
            waiting.start()
            # The first one ends when the context is full; the second waits until then.
            until(lambda: service.queued == 1 or not waiting.is_alive())
            found = scraped.figures()
            if service.queued == 1:
                assert (found["requests_in_flight",], found["requests_queued",]) == (1, 1)
        waiting.join()
        until(lambda: not service.running)

    moved = scraped.moved(queue_up)
    assert moved["request_queue_seconds_total",] > 0
    found = scraped.figures()
    assert (found["requests_in_flight",], found["requests_queued",]) == (0, 0)


def test_orders_move_the_cache(scraped: Scraped) -> None:
    """Warm, pin, evict, a smaller budget, and pages that the kernel took."""
    scraped.ask()
    service = scraped.service
    steering, actions = service.steering, service.actions
    budget = steering.cache.budget_bytes

    def warm() -> None:
        actions.evict(Selection(), everything=True)
        made = actions.start_warm(WarmOrder("all"))
        until(lambda: actions.finish_warm(made, 1.0))

    moved = scraped.moved(warm)
    assert moved["cache_evictions_total", "request"] > 0
    assert moved["cache_admissions_total", "warm"] > 0
    found = scraped.figures()
    assert found["warmup_done_bytes",] > 0
    assert found["warmup_target_bytes",] >= found["warmup_done_bytes",]
    assert found["cache_bytes", "resident"] == steering.cache.resident_bytes > 0
    held = steering.cache.resident()
    moved = scraped.moved(lambda: actions.pin(Selection(experts=tuple(held[:3]))))
    if not moved:
        pytest.skip("nothing may be locked here")
    assert moved["cache_experts", "pinned"] == 3
    assert moved["cache_bytes", "pinned"] > 0
    assert moved["locked_bytes",] > 0
    assert scraped.moved(lambda: actions.unpin(Selection()))["cache_experts", "pinned"] == -3

    def shrink() -> None:
        less = replace(service.settings, budget_share=0.125)
        scraped.server.call(lambda: service.reconfigure(less))
        until(lambda: steering.cache.budget_bytes <= budget // 2)

    moved = scraped.moved(shrink)
    assert moved["cache_capacity_bytes",] <= budget // 2 - budget
    assert moved["cache_evictions_total", "resize"] > 0
    scraped.server.call(lambda: service.reconfigure(service.settings))
    until(lambda: steering.cache.budget_bytes == budget)
    gone = steering.cache.resident()[:5]
    assert scraped.moved(lambda: steering.forget(gone))["cache_evictions_total", "dropped"] >= 5


def test_predictions_are_counted_when_they_are_used_and_when_they_are_not(scraped: Scraped) -> None:
    scraped.ask()
    steering = scraped.service.steering
    used = steering.cache.resident()

    def predict() -> None:
        steering.evict(used)
        steering.act(lambda cache: cache.predict(used))
        scraped.ask()

    moved = scraped.moved(predict)
    assert moved["cache_admissions_total", "predict"] > 0
    assert moved["prefetch_experts_total", "used"] > 0

    def waste() -> None:
        everything = list(range(len(steering.layout.expert_sizes)))
        steering.evict(everything)
        steering.act(lambda cache: cache.predict(everything))
        steering.evict(everything)

    assert scraped.moved(waste)["prefetch_experts_total", "wasted"] > 0


def test_pages_that_were_taken_are_read_by_faults(scraped: Scraped, demo_model: Path) -> None:
    with demo_model.open("rb") as file:
        os.fsync(file)  # what was just unpacked is not on the disk yet and cannot be dropped
    service = scraped.service
    steering, budget = service.steering, service.steering.cache.budget_bytes
    scraped.server.call(lambda: service.reconfigure(replace(service.settings, budget_share=1.0)))
    until(lambda: steering.cache.budget_bytes > 2 * budget)
    scraped.ask(cache_prompt=False)  # all that it uses stays: nothing will be fetched the second time

    def lose() -> None:
        steering.worker.drain(10)
        steering.pager.evict(range(len(steering.layout.expert_sizes)))
        scraped.ask(cache_prompt=False)

    moved = scraped.moved(lose)
    scraped.server.call(lambda: service.reconfigure(service.settings))
    until(lambda: steering.cache.budget_bytes == budget)
    if ("page_faults_total", "major") not in moved:
        pytest.skip("the model's pages cannot be dropped here, or its disk is memory")
    assert moved["disk_read_bytes_total",] > 0


def test_calls_that_the_kernel_refuses_are_counted(scraped: Scraped) -> None:
    steering = scraped.service.steering
    pager = steering.pager
    steering.worker.drain(10)
    reading, writing = os.pipe()
    try:
        pipe = replace(pager.mapping.files[0], fd=reading)

        def refuse() -> None:
            pager._drop_range(pipe, 0, 4096)
            pager._lane._willneed(reading, 0, 4096, 4096)
            pager.wait_extents([Extent(0, 1 << 45, 4096)])

        moved = scraped.moved(refuse)
    finally:
        os.close(reading)
        os.close(writing)
    assert all(moved.get(("io_errors_total", op), 0) >= 1 for op in ("evict", "fetch", "wait")), moved


def test_a_profile_that_was_saved_says_when(scraped: Scraped) -> None:
    scraped.ask()
    before = time.time()
    moved = scraped.moved(scraped.service.profiles.save)
    assert moved["profile_saves_total",] == 1
    assert before <= scraped.figures()["profile_last_save_timestamp_seconds",] <= time.time()
    assert "profile_save_failures_total" not in {k[0] for k in moved}


def test_the_bottleneck_follows_the_work(scraped: Scraped) -> None:
    watch = scraped.watch
    watch.tick(0.0)
    watch.tick(10.0)
    assert scraped.figures()["bottleneck", "idle"] == 1
    scraped.ask(tokens=200)
    watch.tick(20.0)
    found = scraped.figures()
    assert found["bottleneck", "idle"] == 0
    assert sum(v for k, v in found.items() if k[0] == "bottleneck") == 1
    assert found["thrashing",] in (0, 1)
