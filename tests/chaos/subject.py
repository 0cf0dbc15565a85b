"""The daemon that chaos is done to: started, asked, killed and started anew on one state directory, socket and port.

Here too is what must hold of it whatever was done: `Subject.sound`. What is done stands in `kills` and `troubles`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from expertd.errors import StateError
from expertd.runtime import profile_file

PATIENCE_SECONDS = 120.0
PROMPT = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
SHORT = {**PROMPT, "max_tokens": 4}
LONG = {**PROMPT, "max_tokens": 900, "stream": True}
ANONYMOUS_SLACK_KIB = 24_576
"""What a daemon's own memory may differ by: Python's allocator and llama.cpp's buffers settle late."""
SLACK = 2
"""Descriptors and threads that may come and go: a thread that somebody waited in is kept for the next."""


class Violation(Exception):
    """Something does not hold; the message says what was found."""


def expect(condition: object, found: object) -> None:
    if not condition:
        raise Violation(str(found)[-2000:])


def wait_for(what: str, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Violation(f"{what}: did not come within {seconds:.0f} s")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Footprint:
    """Of a process: its own memory, its descriptors and threads."""

    anonymous_kib: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        n_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(fields["RssAnon"].split()[0]), n_descriptors, int(fields["Threads"]))

    def within(self, before: Footprint) -> bool:
        """Whether nothing leaked since."""
        return (
            self.descriptors <= before.descriptors + SLACK
            and self.threads <= before.threads + SLACK
            and self.anonymous_kib <= before.anonymous_kib + ANONYMOUS_SLACK_KIB
        )

    def __str__(self) -> str:
        return f"{self.anonymous_kib / 1024:.0f} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Subject:
    """One daemon at a time in `directory`, steered with a budget of a quarter of its experts. `state` is its state
    directory; `wrap` a command that starts it; `more` flags after the usual ones."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *more: str,
        state: Path | None = None,
        wrap: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.directory, self.state = model, directory, state or directory / "state"
        self._more, self._wrap, self._variables = more, tuple(wrap), dict(variables or {})
        self.port, self.socket = free_port(), directory / "admin.sock"
        self.log_path = directory / "daemon.log"
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        # Connections are not kept: they would count among the daemon's descriptors.
        alone = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS, limits=alone)
        transport = httpx.HTTPTransport(uds=str(self.socket), limits=alone)
        self.admin = httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_SECONDS)

    def _command(self) -> list[str]:
        return [
            *self._wrap, sys.executable, "-m", "expertd", "serve", "--model", str(self.model), "--ctx", "1024",
            "--port", str(self.port), "--socket", str(self.socket), "--steering", "on", "--budget", "25%",
            "--threads", "1", "--set", "engine.threads_batch=1", "--set", f"state.directory={self.state}",
            "--set", "profile.save_seconds=0.05", *self._more,
        ]  # fmt: skip

    def spawn(self) -> None:
        """Starts it and does not wait. What it writes is appended to the log."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("EXPERTD_", "XDG_", "NOTIFY_", "STATE_"))}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env={**kept, "HOME": str(self.directory), **self._variables}
            )
        self.starts += 1

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_for("readiness", self.is_ready)

    def is_ready(self) -> bool:
        """Whether it answers that it is; Violation when it has ended."""
        assert self._process is not None
        expect(self._process.poll() is None, f"the daemon ended with {self._process.returncode}: {self.log()}")
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def pid(self) -> int:
        """The daemon's own: it has no children, a command that started it has it."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def kill(self) -> None:
        """kill -9, and waits for its end."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM; Violation unless it ends with 0."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGTERM)
        try:
            code = self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Violation("it did not end at SIGTERM") from None
        expect(code == 0, f"it ended with {code}: {self.log()}")
        expect(not self.socket.exists(), "its socket is left")

    def close(self) -> None:
        """Ends it if it runs, whatever it does."""
        self.http.close()
        self.admin.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def log(self, n_bytes: int = 1500) -> str:
        return self.log_path.read_text(errors="replace")[-n_bytes:]

    def said(self, words: str, since: int = 0) -> bool:
        """Whether the log has the words after its first `since` bytes."""
        return words in self.log_path.read_bytes()[since:].decode(errors="replace")

    def footprint(self) -> Footprint:
        return Footprint.of(self.pid)

    # What must hold.

    def answers(self) -> tuple[str, str]:
        """What it says greedily to a completion and to a chat."""
        told = self.http.post("/v1/completions", json=PROMPT)
        expect(told.status_code == 200, told.text)
        chat = self.http.post("/v1/chat/completions", json=CHAT)
        expect(chat.status_code == 200, chat.text)
        return told.json()["choices"][0]["text"], chat.json()["choices"][0]["message"]["content"]

    def sound(self, reference: tuple[str, str]) -> None:
        """It is healthy, says what it has always said, and its cache keeps to the budget."""
        expect(self.http.get("/health").status_code == 200, "/health")
        found = self.answers()
        expect(found == reference, f"other words: {found} instead of {reference}")
        cache = self.admin.get("/expertd/cache").json()
        expect(cache["resident_bytes"] <= cache["budget_bytes"], cache)

    def profile_files(self) -> list[Path]:
        return sorted((self.state / "profiles").glob("*/*"))

    def profiles(self) -> dict[str, int]:
        """Tokens by the name of each profile on the disk; Violation for one that does not load."""
        found = {}
        for path in self.profile_files():
            if path.name.endswith(profile_file.SUFFIX):
                try:
                    found[path.stem] = profile_file.decode(path.read_bytes()).tokens
                except StateError as error:
                    raise Violation(f"{path.name}: {error.line()}") from error
        return found

    def all_saved(self) -> bool:
        """Whether the disk has what the daemon's default profile has learnt."""
        told = self.admin.get("/expertd/profiles/default").json()["tokens"]
        return bool(self.profiles().get("default") == told)

    def passing_files(self) -> list[str]:
        """Names of what lies beside the profiles: of a writer at work, or of one that was killed."""
        known = (profile_file.SUFFIX, ".lock")
        return [path.name for path in self.profile_files() if not path.name.endswith(known)]


@contextlib.contextmanager
def subject(model: Path, directory: Path, *more: str, **how: Any) -> Iterator[Subject]:
    """A `Subject`, not started; ended at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Subject(model, directory, *more, **how)
    try:
        yield made
    finally:
        made.close()
