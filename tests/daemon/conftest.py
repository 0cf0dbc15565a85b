"""A real daemon in a process of its own, reached over its admin socket and its port."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

READY_SECONDS = 90.0


@dataclass
class RunningDaemon:
    """`http` speaks to its port, `admin` to its socket."""

    process: subprocess.Popen[str]
    http: httpx.Client
    admin: httpx.Client
    directory: Path
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self, seconds: float = 30) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)


def arguments(model: Path, directory: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "expertd", "serve", "--model", str(model), "--port", "0", "--steering", "on",
        "--budget", "40%", "--ctx", "1024", "--socket", str(directory / "admin.sock"),
        "--set", f"state.directory={directory}", *more,
    ]  # fmt: skip


def environment(directory: Path) -> dict[str, str]:
    """None of the caller's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EXPERTD_", "XDG_"))}
    return {**kept, "HOME": str(directory)}


@contextlib.contextmanager
def daemon(model: Path, directory: Path, *more: str, ready: bool = True) -> Iterator[RunningDaemon]:
    """Started, and ready unless told otherwise; killed at the end if it is still there."""
    log_path = directory / "daemon.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            arguments(model, directory, *more), stdout=log, stderr=log, text=True, env=environment(directory)
        )
    admin = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(directory / "admin.sock")), base_url="http://localhost", timeout=30
    )
    try:
        status = _status(process, admin, ready, log_path)
        with httpx.Client(base_url=status["url"], timeout=60) as http:
            yield RunningDaemon(process, http, admin, directory, log_path)
    finally:
        admin.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def _status(process: subprocess.Popen[str], admin: httpx.Client, ready: bool, log: Path) -> dict[str, Any]:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            found: dict[str, Any] = admin.get("/expertd/status").json()
            if found["state"] == "ready" or not ready:
                return found
        time.sleep(0.02)
    raise AssertionError(f"not ready: {log.read_text()}")


@pytest.fixture
def running(demo_model: Path, tmp_path: Path) -> Iterator[RunningDaemon]:
    with daemon(demo_model, tmp_path) as started:
        yield started
