"""A running daemon pins the stable hot core by itself, within its limit, and gives it back when memory gets short."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertd.bench.cgroup import MemoryGroup, memory_group
from expertd.errors import BenchError
from tests.warm_daemon.conftest import CODE

LIMIT = 320 << 20
PIN_BUDGET = 200 << 10
HOG = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print(flush=True)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        made = memory_group(LIMIT)
        with made as group:
            yield group
    except BenchError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")


@contextmanager
def _daemon(group: MemoryGroup, model: Path, state: Path) -> Iterator[httpx.Client]:
    socket = state / "admin.sock"
    words = [
        "serve", "--model", str(model), "--steering", "on", "--budget", "40%", "--port", "0", "--ctx", "512",
        "--threads", "1", "--socket", str(socket), "--set", f"state.directory={state}",
        "--set", f"cache.pin_budget={PIN_BUDGET // 1024}KiB",
    ]  # fmt: skip
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(group.command([sys.executable, "-m", "expertd", *words]), stdout=log, stderr=log)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://l", timeout=120) as http:
            assert _reached(lambda: process.poll() is not None or _is_ready(http)), (state / "log").read_text()
            yield http
    finally:
        process.terminate()
        assert process.wait(60) == 0, (state / "log").read_text()


def _is_ready(http: httpx.Client) -> bool:
    with suppress(httpx.HTTPError):
        return http.get("/readyz").status_code == 200
    return False


def _reached(there: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _say(http: httpx.Client, prompt: str, tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    http.post("/v1/completions", json=body).raise_for_status()


def _auto_pins(http: httpx.Client, change: str) -> float:
    name = f'expertd_auto_pins_total{{change="{change}"}} '
    return next(float(line[len(name) :]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))


def _cache(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/expertd/cache").json()
    return found


def _free_bytes(group: MemoryGroup) -> int:
    """What the group could still give, file pages included."""
    stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    usage = group.path / ("memory.current" if group.version == 2 else "memory.usage_in_bytes")
    file = int(stat["inactive_file"]) + int(stat["active_file"])
    return group.limit_bytes - int(usage.read_text()) + file


@pytest.mark.root
@pytest.mark.cgroup
def test_the_hot_core_is_pinned_within_its_limit_and_given_back_when_memory_is_short(
    group: MemoryGroup, model: Path, tmp_path: Path
) -> None:
    with _daemon(group, model, tmp_path) as http:
        assert _auto_pins(http, "pinned") == 0
        for turn in range(60):
            _say(http, CODE[turn % 3], 100)
            assert _cache(http)["pinned_bytes"] <= PIN_BUDGET
            if _auto_pins(http, "pinned"):
                break
        assert _auto_pins(http, "pinned") > 0, "one topic again and again has a stable hot core"
        assert _reached(lambda: 0 < _cache(http)["pinned_bytes"] <= PIN_BUDGET), _cache(http)
        given_up = _auto_pins(http, "unpinned")
        _squeeze(group, lambda: _cache(http)["pinned_bytes"] == 0)
        assert _auto_pins(http, "unpinned") > given_up
        _say(http, CODE[0], 8)
        assert group.oom_kills() == 0
    log = (tmp_path / "log").read_text()
    assert "experts of the hot core: " in log
    assert "of pinned experts are given up" in log


def _squeeze(group: MemoryGroup, enough: Callable[[], bool]) -> None:
    """Another process of the group takes its memory, at first down to 16 MiB and then by the MiB."""
    command = group.command([sys.executable, "-c", HOG])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdin is not None
        assert hog.stdout is not None
        try:
            for step in range(64):
                nbytes = max(1 << 20, _free_bytes(group) - (16 << 20)) if not step else 1 << 20
                hog.stdin.write(b"%d\n" % nbytes)
                hog.stdin.flush()
                assert hog.stdout.readline(), "the hog was killed before the pins were given up"
                if _reached(enough, 0.6):
                    return
        finally:
            hog.kill()
    raise AssertionError("the pins were kept")
