"""What a machine does to a daemon that runs on: a program that takes its memory, a full disk, clocks that jump, clients
that never finish. Each is one function; it returns what happened, or raises Violation, or `Skipped` by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from expertd.bench.cgroup import memory_group
from expertd.errors import BenchError
from tests.chaos.half_open import BEGINNINGS, BODIES, half_open, n_closed
from tests.chaos.kills import aside
from tests.chaos.subject import LONG, SHORT, Footprint, Subject, expect, subject, wait_for

HOG = Path(__file__).with_name("hog.py")
DESCRIPTORS_FOR_FILES, LEAST_ROOM = 128, 16
"""What the daemon keeps for files, and the connections that it takes however few descriptors there are."""
FAKETIME = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


class Skipped(Exception):
    """This machine cannot do it; the message says why."""


class Stream:
    """A long answer that somebody reads, and how far it is."""

    def __init__(self, daemon: Subject) -> None:
        self._daemon = daemon
        self.n_lines = 0
        self.whole = False

    def read(self) -> None:
        base = self._daemon.http.base_url
        with httpx.Client(base_url=base, timeout=120) as http, http.stream("POST", "/v1/completions", json=LONG) as got:
            for line in got.iter_lines():
                self.n_lines += line.startswith("data: ")
                self.whole = self.whole or line == "data: [DONE]"


@contextlib.contextmanager
def decoding(daemon: Subject) -> Iterator[Stream]:
    """An answer that began; at the end it must be whole."""
    stream = Stream(daemon)
    with aside(stream.read):
        wait_for("the first tokens", lambda: stream.n_lines > 3)
        yield stream
    expect(stream.whole, f"the stream ended after {stream.n_lines} lines: {daemon.log()}")


def settled(daemon: Subject) -> Footprint:
    """The footprint after a warm-up of its own, so that what is made at the first use is no leak."""
    daemon.answers()
    with decoding(daemon):
        pass
    return daemon.footprint()


def nothing_leaked(daemon: Subject, before: Footprint) -> str:
    wait_for(f"the footprint of before ({before})", lambda: daemon.footprint().within(before), 100)
    return f"{before} before, {daemon.footprint()} after"


def memory_hog(model: Path, directory: Path, reference: tuple[str, str], limit_nbytes: int) -> str:
    """Beside it a program takes all memory of its group until the kernel kills that, while it decodes. Without the
    means to make a group, the program takes half of what is free."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit_nbytes))
            wrap, more = group.command([]), []
        except BenchError:
            group, wrap = None, []
            more = ["--bytes", str(_available_nbytes() // 2)]
        daemon = stack.enter_context(subject(model, directory, wrap=wrap))
        daemon.start()
        before = settled(daemon)
        with decoding(daemon) as stream:
            hog = subprocess.Popen([*wrap, sys.executable, str(HOG), *more])
            try:
                code = hog.wait(300)
            finally:
                hog.kill()
                hog.wait()
            n_lines = stream.n_lines
        if group is not None:
            expect(code == -signal.SIGKILL and group.oom_kills() >= 1, f"the hog ended with {code}")
        daemon.sound(reference)
        found = nothing_leaked(daemon, before)
        daemon.stop()
        how = "killed by the kernel in the daemon's group" if group else "with half of the free memory, no group"
        return f"the hog was {how} at line {n_lines} of the stream; {found}"


def _available_nbytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[None]:
    """A tmpfs. Skipped where it may not be mounted."""
    path.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Skipped(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill(path: Path) -> None:
    with (path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def full_disk(model: Path, directory: Path, reference: tuple[str, str]) -> str:
    """The state directory's disk is full while it learns, and when it starts; then there is room again."""
    state = directory / "small"
    with small_disk(state, 256 << 10), subject(model, directory, state=state) as daemon:
        daemon.start()
        before = settled(daemon)
        wait_for("all saved", daemon.all_saved)
        _fill(state)
        saved = daemon.profiles()
        daemon.sound(reference)
        wait_for("the word that it is not saved", lambda: daemon.said("profiles are kept in memory only"))
        expect(daemon.profiles() == saved, "the profile of before was touched")
        wait_for("no files left", lambda: not daemon.passing_files())
        daemon.kill()
        daemon.start()
        daemon.sound(reference)
        expect(daemon.profiles() == saved, "the profile of before was touched")
        (state / "filler").unlink()
        daemon.http.post("/v1/completions", json=SHORT)
        wait_for("profiles saved again", lambda: daemon.profiles() != saved)
        daemon.sound(reference)
        found = nothing_leaked(daemon, before)
        daemon.stop()
        kept = daemon.profiles()
        expect(sum(kept.values()) > sum(saved.values()), f"{saved} before, {kept} after")
        return f"{sum(saved.values())} tokens kept while full, {sum(kept.values())} after; {found}"


def clock_jumps(model: Path, directory: Path, reference: tuple[str, str]) -> str:
    """The wall clock goes ten years on, twenty back and home again while it decodes, and it is stopped for a moment,
    which to the process is a jump of the monotonic clock. The monotonic clock begins years from now where a time
    namespace can be had. The wall clock is Debian's libfaketime, in the daemon alone."""
    library = next((str(p) for pattern in FAKETIME for p in Path("/").glob(pattern[1:])), "")
    if not library:
        raise Skipped("the wall clock cannot jump without libfaketime (Debian's package faketime)")
    directory.mkdir(parents=True, exist_ok=True)
    offset = directory / "offset"
    offset.write_text("+0\n")
    variables = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    wrap = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", "200000000", "--boottime", "200000000"]
    apart = not subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode
    with subject(model, directory, wrap=wrap if apart else [], variables=variables) as daemon:
        daemon.start()
        before = settled(daemon)
        for years in (10, -10, 0):
            with decoding(daemon) as stream:
                _rename_in(offset, f"{years * 365 * 86400:+d}\n")
                n_lines = stream.n_lines
                time.sleep(1.1)
                wait_for("tokens after the jump", lambda n=n_lines, s=stream: s.whole or s.n_lines > n)  # type: ignore[misc]
            told = daemon.http.post("/v1/completions", json=SHORT).json()["created"]
            expect(abs(told - time.time() - years * 365 * 86400) < 86400, f"the clock did not jump: {told}")
            saved = daemon.profiles()
            daemon.http.post("/v1/completions", json=SHORT)
            wait_for("a save after the jump", lambda s=saved: daemon.profiles() != s)  # type: ignore[misc]
            daemon.sound(reference)
        with decoding(daemon):
            os.kill(daemon.pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.sound(reference)
        found = nothing_leaked(daemon, before)
        daemon.stop()
    began = "begun years on in a time namespace" if apart else "as it is: no time namespace"
    return f"wall clock +10, -10 years and back, stopped for 3 s; monotonic clock {began}; {found}"


def _rename_in(path: Path, text: str) -> None:
    """Whole at once: the library reads it at every look at the clock."""
    passing = path.with_suffix(".new")
    passing.write_text(text)
    passing.replace(path)


def never_finished(model: Path, directory: Path, reference: tuple[str, str], n: int, *, bodies: bool) -> str:
    """So many connections that begin a request and never finish it. With `bodies` some have begun the body, which may
    take a minute longer."""
    with subject(model, directory) as daemon:
        daemon.start()
        before = settled(daemon)
        with half_open(daemon.port, n, (*BEGINNINGS, *(BODIES if bodies else ()))) as connections:
            most = 0
            for _ in range(40):
                most = max(most, daemon.footprint().descriptors)
                if most >= before.descriptors + n:
                    break
                time.sleep(0.05)
            expect(most >= before.descriptors + n // 2, f"{most} descriptors with {n} connections")
            daemon.sound(reference)
            with decoding(daemon):
                pass
            wait_for("the daemon to end them", lambda: n_closed(connections) == n)
            daemon.sound(reference)
        found = nothing_leaked(daemon, before)
        daemon.stop()
        return f"{n} connections, {most} descriptors at most, all ended by the daemon; {found}"


def besieged(model: Path, directory: Path, reference: tuple[str, str], n: int) -> str:
    """More connections than it has descriptors for, none of which finishes a request: others are served at once, an
    answer that runs goes on, and what is learned is saved."""
    n_room = max(LEAST_ROOM, n // 4)
    wrap = ["/bin/sh", "-c", f'ulimit -n {DESCRIPTORS_FOR_FILES + n_room} && exec "$@"', "sh"]
    with subject(model, directory, wrap=wrap) as daemon:
        daemon.start()
        before = settled(daemon)
        with half_open(daemon.port, n, (*BEGINNINGS, *BODIES)) as first:
            daemon.sound(reference)
            with decoding(daemon) as stream, half_open(daemon.port, n) as second:
                n_lines = stream.n_lines
                wait_for("tokens in the siege", lambda: stream.whole or stream.n_lines > n_lines)
                wait_for("room to be made", lambda: n_closed(first) + n_closed(second) >= 2 * n - n_room)
            daemon.sound(reference)
            wait_for("all saved", daemon.all_saved)
        found = nothing_leaked(daemon, before)
        daemon.stop()
        return f"{2 * n} connections where there is room for {n_room}; {found}"
