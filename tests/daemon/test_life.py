"""A daemon's life: it answers while it loads, streams, is scraped, reloads, and ends cleanly."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import httpx

from tests.daemon.conftest import RunningDaemon, daemon

CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 40,
}  # fmt: skip


def test_chat_whole_and_streamed_say_the_same(running: RunningDaemon) -> None:
    whole = running.http.post("/v1/chat/completions", json=CHAT).json()
    assert whole["choices"][0]["message"]["content"] == "The capital of France is Paris."
    text = ""
    with running.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            text += choice["delta"].get("content") or ""
    assert text == whole["choices"][0]["message"]["content"]


def test_completions_and_models(running: RunningDaemon) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    assert running.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
    assert running.http.get("/v1/models").json()["data"][0]["id"] == "tiny-moe-q4_0"


def test_probes_and_metrics_and_the_cache_report_agree(running: RunningDaemon) -> None:
    running.http.post("/v1/chat/completions", json=CHAT)
    for path in ("/health", "/livez", "/readyz"):
        assert running.http.get(path).status_code == 200
    cache = running.http.get("/expertd/cache").json()
    metrics = running.http.get("/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#") and " " in line
    )
    assert float(values['expertd_cache_requests_total{result="hit"}']) == cache["hits"] > 0
    assert float(values['expertd_cache_requests_total{result="miss"}']) == cache["misses"] > 0
    assert float(values["expertd_cache_capacity_bytes"]) == cache["budget_bytes"]
    assert float(values["expertd_generated_tokens_total"]) > 0
    assert float(values["expertd_routes_total"]) > 0
    assert float(values["expertd_tap_seconds_total"]) > 0
    assert float(values["expertd_model_load_seconds"]) > 0
    assert float(values["expertd_ready"]) == 1


def test_it_ends_at_sigterm_with_zero_and_leaves_no_socket(running: RunningDaemon) -> None:
    assert running.stop() == 0
    assert not (running.directory / "admin.sock").exists()
    assert "stopped" in running.log


def test_sigterm_in_the_middle_of_an_answer(running: RunningDaemon) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        running.process.terminate()
        with contextlib.suppress(httpx.TransportError):
            list(lines)
    assert running.process.wait(30) == 0


def test_sighup_applies_a_budget_and_names_what_needs_a_restart(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "expertd.toml"
    file.write_text("[engine]\nn_ctx = 512\n")
    with daemon(demo_model, tmp_path, "--config", str(file)) as running:
        file.write_text("[engine]\nn_batch = 64\n[cache]\nreserve = '100MiB'\n")
        running.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 20
        while "reload" not in running.log and time.monotonic() < end:
            time.sleep(0.05)
        assert "a restart is needed for" in running.log
        assert running.http.get("/health").status_code == 200
        file.write_text("[cache]\npin_budget = 'nonsense'\n")
        running.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 20
        while "nothing was changed" not in running.log and time.monotonic() < end:
            time.sleep(0.05)
        assert "nothing was changed" in running.log
        assert running.stop() == 0
