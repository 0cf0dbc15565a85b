"""What systemd is told: readiness, status, reload, stop, and signs of life.

The protocol is a datagram of KEY=VALUE lines to the socket named by NOTIFY_SOCKET (sd_notify(3)). Without it every call
does nothing. What is said when is the daemon's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_EXTEND_SECONDS = 60.0
_NARRATE_SECONDS = 2.0


class Notifier:
    """Speaks to the service manager. Any thread may call it; a failed send is logged once and never raised."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._address = _address(env.get("NOTIFY_SOCKET", ""))
        self._failed = False
        self._status = ""
        self.watchdog_seconds = _watchdog_seconds(env)
        """The time without a sign of life after which the daemon is killed; None where nobody watches."""

    @property
    def enabled(self) -> bool:
        return self._address is not None

    def ready(self, status: str) -> None:
        """The service is up, or a reload is done."""
        self._send(f"READY=1\n{self._status_line(status)}")

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        if text != self._status:
            self._send(self._status_line(text))

    def reloading(self) -> None:
        """A reload begins; `ready` ends it. systemd wants the time of the monotonic clock with it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "Stopping") -> None:
        self._send(f"STOPPING=1\n{self._status_line(status)}")

    def alive(self) -> None:
        """A sign of life for the watchdog."""
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """Ask for this much more time from now to start or to stop."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _status_line(self, text: str) -> str:
        self._status = text
        # A line end would begin a new assignment.
        return "STATUS=" + " ".join(text.split())

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
                s.connect(self._address)
                s.send(message.encode())
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("systemd cannot be told (%s): %s", message.partition("\n")[0], error.strerror)


def _address(name: str) -> str | None:
    """`@name` is an abstract socket, which begins with a zero byte."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else None


def _watchdog_seconds(env: Mapping[str, str]) -> float | None:
    text, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    # WATCHDOG_PID is inherited by children, whom nobody watches.
    if not text.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 1e6 or None


async def keep_alive(notifier: Notifier, healthy: Callable[[], bool] = lambda: True) -> None:
    """Sends signs of life at half the interval while `healthy`; runs until cancelled. It is on the loop on purpose: a
    loop that does not turn must be found out."""
    if notifier.watchdog_seconds is None or not notifier.enabled:
        return
    while True:
        if healthy():
            notifier.alive()
        await asyncio.sleep(notifier.watchdog_seconds / 2)


async def narrate(notifier: Notifier, describe: Callable[[], str]) -> None:
    """Tells the status while the daemon starts or stops, and asks for more time so long as it says something new;
    runs until cancelled. A start that stands still runs into systemd's own limit."""
    said = ""
    while True:
        text = describe()
        if text != said:
            notifier.status(text)
            notifier.extend_timeout(_EXTEND_SECONDS)
            said = text
        await asyncio.sleep(_NARRATE_SECONDS)
