"""The datagrams that systemd gets, over a real socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.telemetry.notify import Notifier, keep_alive, narrate


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(5)

    def heard(self, count: int) -> list[list[str]]:
        return [self._socket.recv(4096).decode().split("\n") for _ in range(count)]

    def silent(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(5)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[Manager, str]]:
    path = str(tmp_path / "notify")
    found = Manager(path)
    yield found, path
    found.close()


def test_each_word_has_its_assignments(manager: tuple[Manager, str]) -> None:
    heard, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path})
    notifier.status("Loading: 40 %\nREADY=1")
    notifier.extend_timeout(90)
    notifier.ready("Serving tiny")
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    notifier.alive()
    notifier.stopping()
    words = heard.heard(6)
    assert words[0] == ["STATUS=Loading: 40 % READY=1"]
    assert words[1] == ["EXTEND_TIMEOUT_USEC=90000000"]
    assert words[2] == ["READY=1", "STATUS=Serving tiny"]
    assert words[3][0] == "RELOADING=1"
    name, _, usec = words[3][1].partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(usec) <= time.monotonic_ns() // 1000
    assert words[4:] == [["WATCHDOG=1"], ["STOPPING=1", "STATUS=Stopping"]]


def test_a_status_is_sent_once(manager: tuple[Manager, str]) -> None:
    heard, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path})
    for _ in range(3):
        notifier.status("same")
    heard.heard(1)
    assert heard.silent()


def test_abstract_sockets_are_reached() -> None:
    name = f"expertd-test-{os.getpid()}"
    heard = Manager("\0" + name)
    Notifier({"NOTIFY_SOCKET": "@" + name}).alive()
    assert heard.heard(1) == [["WATCHDOG=1"]]
    heard.close()


def test_without_a_manager_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for env in ({}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        notifier = Notifier(env)
        assert not notifier.enabled
        notifier.ready("x")
    gone = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    with caplog.at_level(logging.WARNING):
        gone.ready("x")
        gone.alive()
    assert [r.getMessage() for r in caplog.records] == ["systemd cannot be told (READY=1): No such file or directory"]


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdogs_interval(env: dict[str, str], seconds: float | None) -> None:
    assert Notifier(env).watchdog_seconds == seconds


def test_signs_of_life_stop_with_health(manager: tuple[Manager, str]) -> None:
    heard, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000"})
    health = [True, True, False]

    async def run() -> None:
        task = asyncio.create_task(keep_alive(notifier, lambda: health.pop(0) if health else False))
        while health:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(run())
    assert heard.heard(2) == [["WATCHDOG=1"]] * 2
    assert heard.silent()


def test_a_start_that_goes_on_asks_for_time_and_one_that_stands_does_not(
    manager: tuple[Manager, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, path = manager
    monkeypatch.setattr("expertd.telemetry.notify._NARRATE_SECONDS", 0.005)
    texts = ["Loading 1 %", "Loading 2 %"]

    async def run() -> None:
        describe = lambda: texts.pop(0) if len(texts) > 1 else texts[0]  # noqa: E731
        task = asyncio.create_task(narrate(Notifier({"NOTIFY_SOCKET": path}), describe))
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(run())
    extend = ["EXTEND_TIMEOUT_USEC=60000000"]
    assert heard.heard(4) == [["STATUS=Loading 1 %"], extend, ["STATUS=Loading 2 %"], extend]
    assert heard.silent()
