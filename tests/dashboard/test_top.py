"""`expertd top` as it is used: on a terminal (a pty), in a pipe, as JSON, across a restart."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _heed_interrupts() -> None:
    """A test run in the background of a shell ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`expertd top` with a terminal of 110 x 40 as its screen and keyboard."""

    def __init__(self, *arguments: str) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        self.before = termios.tcgetattr(inner)
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "expertd", "top", *arguments], stdin=inner, stdout=inner, stderr=inner,
            env=environment, start_new_session=True, preexec_fn=_heed_interrupts,
        )  # fmt: skip
        self._inner = inner
        self.raw = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What the screen got until `text` was in it, without control codes; what came before is forgotten."""
        end, seen = time.monotonic() + seconds, ""
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} did not come; the screen got {seen[-2000:]!r}"
            if self._read(0.2):
                seen = _CODES.sub("", self.raw)
        self.raw = ""
        return seen

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def end(self) -> int:
        """The exit code, once it has ended by itself. Reads on meanwhile: a full terminal keeps a writer waiting."""
        end = time.monotonic() + 60.0
        while self._read(0.2) or self.process.poll() is None:
            assert time.monotonic() < end, "it did not end"
        return self.process.wait()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        self.raw += os.read(self._fd, 65536).decode(errors="replace")
        return True

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._inner)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)
        os.close(self._inner)


@pytest.fixture
def terminal(daemon: Any) -> Iterator[Terminal]:
    made = Terminal("--socket", str(daemon.socket))
    yield made
    made.close()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "expertd", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_screen_shows_the_map_and_follows(daemon: Any, terminal: Terminal) -> None:
    screen = terminal.wait_for("memory of")
    assert "8 layers x 64 experts" in screen
    assert "▀" in screen
    with daemon.generating():
        terminal.wait_for("writing: ")
    terminal.wait_for("idle")
    terminal.press("q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.raw, "the terminal's own screen is back"
    assert terminal.settings() == terminal.before


def test_it_waits_for_a_daemon_that_goes_away(daemon: Any, terminal: Terminal) -> None:
    terminal.wait_for("q quits")
    daemon.stop()
    terminal.wait_for("no answer since")
    daemon.start()
    terminal.wait_for("started again at")
    terminal.press("q")
    assert terminal.end() == 0


def test_control_c_ends_it(terminal: Terminal) -> None:
    terminal.wait_for("q quits")
    terminal.process.send_signal(2)
    assert terminal.end() == 0
    assert terminal.settings() == terminal.before


def test_a_pipe_gets_a_line_for_each_point(daemon: Any, waiting: Callable[..., Any]) -> None:
    waiting(lambda: daemon.get("/expertd/series")["points"], "points")
    with daemon.generating():
        ended = top("--socket", str(daemon.socket), "--count", "3", "--interval", "2.2")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert 2 <= len(lines) <= 4
    assert all(re.match(r"\d\d:\d\d:\d\d ready .* tok/s .* hits .*/s read .* held ", line) for line in lines)
    assert "\x1b" not in ended.stdout


def test_json_is_a_document_a_line(daemon: Any) -> None:
    ended = top("--url", daemon.url, "--json", "--count", "2", "--interval", "0.1")
    documents = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(documents) == 2
    assert documents[0]["state"] == "ready"
    assert documents[0]["away"] is False
    assert documents[0]["cache"]["experts"]["total"] == 512


def test_without_a_daemon_it_says_so(tmp_path: Any) -> None:
    ended = top("--socket", str(tmp_path / "nobody.sock"))
    assert ended.returncode == 3
    assert ended.stderr.startswith("expertd: no daemon answers at ")
    assert len(ended.stderr.splitlines()) == 1


def test_the_reader_of_the_pipe_may_leave(daemon: Any) -> None:
    command = f"{sys.executable} -m expertd top --socket {daemon.socket} --json --interval 0.1 | head -n 1 | wc -l"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "1"
    assert ended.stderr == ""
