"""`expertd status`: what a running daemon says of itself, for a person and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expertd.cli.status import lines
from expertd.telemetry.verdict import Window, decide
from tests.daemon.conftest import RunningDaemon

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def status(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "expertd", "status", "--socket", str(directory / "admin.sock"), *more]
    environment = os.environ | {"EXPERTD_CONFIG": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_a_running_daemon_tells_its_bottleneck(running: RunningDaemon) -> None:
    assert running.http.post("/v1/completions", json=BODY).status_code == 200
    done = status(running.directory)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(None, 1) for line in done.stdout.splitlines() if not line.startswith("note"))
    assert rows["state"] == "ready"
    assert {"model", "steering", "budget", "resident", "hits", "verdict"} <= rows.keys()
    assert rows["verdict"].split(".")[0]
    found: dict[str, Any] = json.loads(status(running.directory, "--json").stdout)
    assert found["state"] == "ready"
    assert found["cache"]["requests"] > 0
    assert {"cause", "sentence", "advice", "thrashing", "figures"} == set(found["verdict"])


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    done = status(tmp_path)
    assert done.returncode not in (0, 1)
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in done.stderr


def test_the_sentence_and_the_advice_are_in_it() -> None:
    window = Window(
        in_flight=1, generated_tokens=20, generation_seconds=9.0, requests=8000, hits=4000, read_nbytes=20 << 30,
        disk_rate=2e9, capacity_nbytes=4 << 30, resident_nbytes=4 << 30, expert_nbytes=16 << 30, evicted=400,
        miss_nbytes=20 << 30,
    )  # fmt: skip
    verdict = decide(window)
    assert verdict.cause == "memory"
    shown = lines({"state": "ready", "cache": {"steering": False, "why": "off"}, "verdict": asdict(verdict)})
    assert shown[-1] == f"verdict    {verdict.sentence} {verdict.advice}"
    loading = lines(
        {"state": "loading", "cache": {"steering": False, "why": "loading"},
         "progress": {"what": "load", "done": 1, "total": 4}}
    )  # fmt: skip
    assert "progress   load 25 %" in loading
