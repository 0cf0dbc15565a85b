"""A decode that hangs, on a disk that stands still: the request fails, the daemon says so, saves and ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from expertd.runtime.hang import COMPUTING_TIMES, HangWatch
from tests.daemon.conftest import RunningDaemon, daemon
from tests.faults.fuse_disk import Disk

BODY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


class Clocks:
    """Wall and processor time as a test says."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def watch(self, limit_seconds: float) -> HangWatch:
        return HangWatch(limit_seconds, lambda: self.wall, lambda: self.cpu)

    def passed(self, seconds: float, cpu_seconds: float = 0.0) -> None:
        self.wall += seconds
        self.cpu += cpu_seconds


def _seconds_until_hung(clocks: Clocks, watch: HangWatch, *, cpu_share: float, most: int = 5000) -> int:
    for n in range(most):
        if watch.look((1,)):
            return n
        clocks.passed(1, cpu_share)
    raise AssertionError("never found")


def test_what_stands_still_is_found_at_its_limit() -> None:
    clocks = Clocks()
    assert _seconds_until_hung(clocks, clocks.watch(120), cpu_share=0.05) == 120


def test_what_computes_unseen_has_ten_times_as_long() -> None:
    clocks = Clocks()
    assert _seconds_until_hung(clocks, clocks.watch(120), cpu_share=3.0) == 120 * COMPUTING_TIMES


def test_whatever_moves_counts_as_life() -> None:
    clocks = Clocks()
    watch = clocks.watch(120)
    for n in range(1000):
        clocks.passed(1)
        assert not watch.look((n // 100, "a page every hundred seconds"))


def test_no_work_and_no_limit_never_hang() -> None:
    clocks = Clocks()
    idle, unlimited = clocks.watch(120), clocks.watch(0)
    for _ in range(1000):
        clocks.passed(1)
        assert not idle.look(None)
        assert not unlimited.look((1,))


def test_a_machine_that_slept_is_no_hang() -> None:
    clocks = Clocks()
    watch = clocks.watch(120)
    assert not watch.look((1,))
    clocks.passed(86_400)
    assert not watch.look((1,))
    assert watch.still_seconds <= 2


def _evict(running: RunningDaemon) -> None:
    """All experts go, so that the next token needs the disk."""
    assert running.admin.post("/expertd/evict", json={"all": True}).status_code == 200


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the daemon tells systemd, with a watchdog of two seconds."""
    path, messages = tmp_path / "notify.sock", []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")

        def listen() -> None:
            while (message := listening.recv(65536).decode()) != "END":
                messages.append(message)

        thread = threading.Thread(target=listen)
        thread.start()
        yield messages
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"END", str(path))
        thread.join()


@pytest.mark.root
def test_a_disk_that_stands_still_ends_the_request_and_the_daemon(disk: Disk, tmp_path: Path, told: list[str]) -> None:
    with daemon(disk.path, tmp_path, "--threads", "1", "--set", "engine.hang_seconds=3") as running:
        assert running.http.post("/v1/completions", json=BODY).status_code == 200
        _evict(running)
        disk.stop()
        with running.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert running.process.wait(30) == 1
        assert _codes(lines, answer) == ["engine_hung"]
        errors = [line for line in running.log.splitlines() if " ERROR " in line]
        assert len(errors) == 1, running.log
        assert "a decode (" in errors[0]
        assert "stands still: nothing has moved for" in errors[0]
        assert str(disk.path) in errors[0]
        assert "Traceback" not in running.log
        saved = list(tmp_path.glob("profiles/*/default.profile"))
        assert len(saved) == 1
        end = next(n for n, message in enumerate(told) if message.startswith("STOPPING=1"))
        assert "WATCHDOG=1" in told[:end]
        assert "WATCHDOG=1" not in told[end:]
        assert "STATUS=a decode (" in told[end]
        assert json.loads(saved[0].read_bytes().split(b"\n")[0])["tokens"] > 0
    disk.go()


def _codes(lines: list[str], answer: httpx.Response) -> list[str]:
    """Codes of the errors in an answer, which may come before its first event or among its events."""
    texts = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    found = [json.loads(text) for text in texts]
    assert answer.status_code in (200, 503)
    return [part["error"]["code"] for part in found if "error" in part]


@pytest.mark.root
def test_a_disk_that_is_merely_slow_is_waited_for(disk: Disk, tmp_path: Path) -> None:
    with daemon(disk.path, tmp_path, "--threads", "1", "--set", "engine.hang_seconds=3600") as running:
        whole = running.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        _evict(running)
        disk.stop()
        timer = threading.Timer(1.0, disk.go)
        timer.start()
        assert running.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == whole
        assert running.stop() == 0


@pytest.mark.root
def test_a_load_from_a_disk_that_stands_still_ends_with_a_line(disk: Disk, tmp_path: Path) -> None:
    disk.stop()
    with daemon(disk.path, tmp_path, "--threads", "1", "--set", "engine.hang_seconds=2", ready=False) as running:
        assert running.process.wait(60) == 1
        assert "the load (loading) stands still" in running.log
    disk.go()
