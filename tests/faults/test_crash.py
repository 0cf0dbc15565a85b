"""The daemon dies in the middle of its work, as by a fault inside llama.cpp: the next one comes back warm."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import httpx

from tests.daemon.conftest import RunningDaemon, daemon

BODY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
OPTIONS = (
    "--threads",
    "1",
    "--set",
    "profile.save_seconds=0.2s",
    "--set",
    "warm.ready_requires=warm",
    "--budget",
    "30%",
)


def _answer(http: httpx.Client) -> str:
    text: str = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    return text


def _saved_tokens(state: Path) -> int:
    found = list(state.glob("profiles/*/default.profile"))
    return int(json.loads(found[0].read_bytes().split(b"\n")[0])["tokens"]) if found else 0


def _die_at_work(running: RunningDaemon) -> None:
    """In the middle of an answer, once the profile is on the disk."""
    end = time.monotonic() + 60
    while not _saved_tokens(running.directory):
        assert time.monotonic() < end, running.log
        time.sleep(0.05)
    body = {**BODY, "max_tokens": 900, "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        running.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: "):
                running.process.send_signal(signal.SIGSEGV)
    assert running.process.wait(30) == -signal.SIGSEGV


def test_the_next_daemon_is_warm_by_the_profile(demo_model: Path, tmp_path: Path) -> None:
    with daemon(demo_model, tmp_path, *OPTIONS) as running:
        text = _answer(running.http)
        _die_at_work(running)
        assert "Fatal Python error: Segmentation fault" in running.log
    # What a daemon that died leaves behind: its socket, its lock's file, half a profile.
    assert (tmp_path / "admin.sock").is_socket()
    directory = next(tmp_path.glob("profiles/*"))
    assert (directory / ".lock").exists()
    (directory / ".default.profile.tmp-1-abcd").write_bytes(b"half")
    learnt = _saved_tokens(tmp_path)
    with daemon(demo_model, tmp_path, *OPTIONS) as running:
        assert f"profile default: learnt from {learnt} tokens" in running.log
        cache = running.http.get("/expertd/cache").json()
        assert cache["experts"]["resident"] > 0
        assert cache["resident_bytes"] > 0.8 * cache["budget_bytes"]
        assert "0 B of 0 B resident" not in running.log
        assert _answer(running.http) == text
        assert not list(directory.glob(".*.tmp-*"))
        assert running.stop() == 0
    assert _saved_tokens(tmp_path) > learnt
