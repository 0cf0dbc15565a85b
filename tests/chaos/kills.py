"""kill -9 at random moments of a daemon's life, each followed by a start that must find everything in order.

A moment is reached by watching for it (a file that is being written, the first token) or by doing what leads to it, and
then a random time passes: the kill falls anywhere in it, and often enough just before or after.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.chaos.subject import LONG, PATIENCE_SECONDS, PROMPT, SHORT, Footprint, Subject, expect, wait_for

START_SECONDS = 1.6
"""About the time from a start to readiness: kills while loading fall into it."""
Moment = Callable[[Subject, random.Random], str]


@contextlib.contextmanager
def aside(work: Callable[[], object]) -> Iterator[None]:
    """`work` in a thread. The daemon is killed below it: how its connection ends is of no interest."""

    def quietly() -> None:
        with contextlib.suppress(httpx.TransportError):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_SECONDS)
        expect(not thread.is_alive(), "a client hangs although the daemon is gone")


def post(daemon: Subject, path: str, body: dict[str, Any], *, admin: bool = False) -> None:
    """On a connection of its own: the shared one may be in use."""
    where = daemon.admin if admin else daemon.http
    transport = httpx.HTTPTransport(uds=str(daemon.socket)) if admin else None
    with httpx.Client(base_url=where.base_url, transport=transport, timeout=PATIENCE_SECONDS) as http:
        http.post(path, json=body)


def while_loading(daemon: Subject, dice: random.Random) -> str:
    """Killed before it was ready, or just then; a start of its own."""
    daemon.kill()
    daemon.spawn()
    seconds = dice.uniform(0, START_SECONDS)
    time.sleep(seconds)
    daemon.kill()
    return f"{seconds:.2f} s after the start"


def while_warming(daemon: Subject, dice: random.Random) -> str:
    daemon.admin.post("/expertd/evict", json={"all": True})
    seconds = dice.uniform(0, 0.04)
    with aside(lambda: post(daemon, "/expertd/warm", {"level": "all"}, admin=True)):
        time.sleep(seconds)
        daemon.kill()
    return f"{seconds * 1000:.0f} ms after the order"


def while_prefilling(daemon: Subject, dice: random.Random) -> str:
    prompt = " ".join(dice.choice(["the", "a", "sea", "of", "and", "light", "way"]) for _ in range(700))
    seconds = dice.uniform(0.02, 0.6)
    with aside(lambda: post(daemon, "/v1/completions", {**SHORT, "prompt": prompt, "cache_prompt": False})):
        time.sleep(seconds)
        daemon.kill()
    return f"{seconds * 1000:.0f} ms after the prompt"


def while_decoding(daemon: Subject, dice: random.Random) -> str:
    n_wanted, n_seen = dice.randint(1, 200), 0
    with contextlib.suppress(httpx.TransportError), daemon.http.stream("POST", "/v1/completions", json=LONG) as answer:
        for line in answer.iter_lines():
            n_seen += line.startswith("data: ")
            if n_seen == n_wanted:
                daemon.kill()
    return f"at token {n_wanted}"


def while_saving(daemon: Subject, dice: random.Random) -> str:
    """Watches the directory for the file that will be the profile."""
    end = threading.Event()

    def teach() -> None:
        while not end.is_set():
            post(daemon, "/v1/completions", {**SHORT, "max_tokens": dice.randint(1, 8)})

    (directory,) = (daemon.state / "profiles").iterdir()
    pid = daemon.pid
    with aside(teach):
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            passing = [name for name in os.listdir(directory) if ".tmp-" in name]
            if passing:
                break
        if dice.random() < 0.3:
            time.sleep(dice.uniform(0, 0.004))
        os.kill(pid, signal.SIGKILL)
        daemon.kill()
        end.set()
    return f"{'with' if daemon.passing_files() else 'without'} a half-written file left"


def while_stopping(daemon: Subject, dice: random.Random) -> str:
    seconds = dice.uniform(0, 0.3)
    with aside(lambda: post(daemon, "/v1/completions", PROMPT)):
        os.kill(daemon.pid, signal.SIGTERM)
        time.sleep(seconds)
        daemon.kill()
    return f"{seconds * 1000:.0f} ms after SIGTERM"


MOMENTS: dict[str, Moment] = {
    "load": while_loading,
    "warm": while_warming,
    "prefill": while_prefilling,
    "decode": while_decoding,
    "save": while_saving,
    "stop": while_stopping,
}


class Kills:
    """A series on one daemon, which runs before and after."""

    def __init__(self, daemon: Subject, reference: tuple[str, str], dice: random.Random) -> None:
        self.daemon, self._reference, self._dice = daemon, reference, dice
        self._known = daemon.profiles()
        self._first: Footprint | None = None
        self.n_half_written = 0
        self.n_kills = 0

    def one(self, moment: str) -> str:
        """Kills at the moment, looks at what is left, starts, and looks whether all is well; what happened."""
        daemon = self.daemon
        happened = MOMENTS[moment](daemon, self._dice)
        self.n_kills += 1
        left = daemon.passing_files()
        self.n_half_written += bool(left)
        expect(len(left) <= 1, f"files pile up: {left}")
        self._look_at_profiles()
        since = daemon.log_path.stat().st_size
        daemon.start()
        expect(not daemon.said("set aside", since), "a profile was set aside")
        # One that is being written has a name of this process.
        mine = f".tmp-{daemon.pid}-"
        expect(all(mine in name for name in daemon.passing_files()), f"left: {daemon.passing_files()}")
        daemon.sound(self._reference)
        self._look_at_footprint()
        return happened

    def _look_at_profiles(self) -> None:
        """What was saved once is there, the same or newer."""
        found = self.daemon.profiles()
        for name, tokens in self._known.items():
            expect(found.get(name, -1) >= tokens, f"profile {name}: {found.get(name)} tokens, {tokens} were saved")
        self._known = found

    def _look_at_footprint(self) -> None:
        """A daemon that was killed leaves nothing that makes the next one larger."""
        found = self.daemon.footprint()
        if self._first is None:
            self._first = found
        first = self._first
        wait_for(
            f"{found}, the first had {first}",
            lambda: self.daemon.footprint().within(Footprint(first.anonymous_kib, first.descriptors, first.threads)),
            20,
        )
