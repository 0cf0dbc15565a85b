"""Runs one arm in a child process under a time limit, and makes a Run of what it says, finished or not.

`time.perf_counter` is the machine's monotonic clock, so the child's readings and this process's can be subtracted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any

import msgspec

from expertd.bench import meter
from expertd.bench.cgroup import MemoryGroup
from expertd.bench.meter import ZERO, Reading
from expertd.bench.spec import PromptRun, Run, RunSpec
from expertd.errors import BenchError
from expertd.units import format_size

Watch = Callable[[dict[str, Any]], None]
"""Called with each line of the child as it comes."""

_TAIL_LINES = 3


class _LateError(Exception):
    """The child did not end in its time."""


def run_child(spec: RunSpec, group: MemoryGroup | None, limit_seconds: float, watch: Watch) -> Run:
    """One run of one arm in `group`. Raises BenchError when the arm fails or dies."""
    command = [sys.executable, "-m", "expertd.bench.arm"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+b") as errors:
        process = subprocess.Popen(
            group.command(command) if group else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            run = _follow(process, spec, began + limit_seconds, watch)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if run is None:
            raise _death(spec, process.returncode, group, errors)
    wall = time.perf_counter() - began
    return replace(run, wall_seconds=wall, peak_bytes=group.peak_bytes() if group else None)


def _follow(process: subprocess.Popen[bytes], spec: RunSpec, deadline: float, watch: Watch) -> Run | None:
    """The run, whole or cut off at the deadline; None when the child went without a word. Raises BenchError with the
    child's words when it said what was wrong."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
    story = _Story(spec)
    try:
        for line in _lines(process.stdout, deadline):
            watch(line)
            if line["at"] == "run":
                process.wait()
                return msgspec.convert(line["run"], Run)
            if line["at"] == "error":
                raise BenchError(f"arm {spec.arm.name}: {line['message']}", hint=line["hint"])
            story.add(line)
    except _LateError:
        try:
            return story.cut(meter.read_other(process.pid))
        except OSError:
            return None
    process.wait()
    return None


def _lines(pipe: IO[bytes], deadline: float) -> Iterator[dict[str, Any]]:
    """The child's lines until it closes its end. Raises _LateError at the deadline."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.perf_counter()
            if left <= 0 or not selector.select(left):
                raise _LateError
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                yield msgspec.json.decode(line)


class _Story:
    """What a child has told so far, for the case that it is cut off."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._load: Reading | None = None
        self._ready: Reading | None = None
        self._answers: list[PromptRun] = []
        self._prompt: tuple[str, int, Reading] | None = None
        self._first: Reading | None = None
        self._gaps: list[float] = []
        self._output: list[int] = []
        self._start = ZERO

    def add(self, line: dict[str, Any]) -> None:
        """One line of the child's."""
        at = line["at"]
        if at == "start":
            self._start = msgspec.convert(line["now"], Reading)
        elif at == "ready":
            self._load = msgspec.convert(line["load_cost"], Reading)
            self._ready = msgspec.convert(line["ready_cost"], Reading)
        elif at == "prompt":
            self._prompt = line["topic"], line["prompt_tokens"], msgspec.convert(line["now"], Reading)
            self._first, self._gaps, self._output = None, [], []
        elif at == "first":
            self._first, self._output = msgspec.convert(line["now"], Reading), [line["token"]]
        elif at == "token":
            self._gaps.append(line["seconds"])
            self._output.append(line["token"])
        elif at == "answer":
            self._answers.append(msgspec.convert(line["answer"], PromptRun))
            self._prompt = None

    def cut(self, now: Reading) -> Run:
        """The run as far as it came. Its last prompt's costs go up to `now`, its tokens are those that came."""
        answers = list(self._answers)
        if self._prompt is not None:
            topic, n, start = self._prompt
            first = self._first or now
            answers.append(
                PromptRun(topic, n, first.since(start), now.since(first), tuple(self._gaps), tuple(self._output))
            )
        so_far = now.since(self._start)
        return Run(
            arm=self._spec.arm.name,
            finished=False,
            load_cost=self._load or so_far,
            ready_cost=self._ready or so_far,
            prompts=tuple(answers),
        )


def _death(spec: RunSpec, status: int, group: MemoryGroup | None, errors: IO[bytes]) -> BenchError:
    name = f"arm {spec.arm.name}"
    if group is not None and group.oom_kills():
        limit = format_size(group.limit_bytes)
        return BenchError(f"{name} was killed for memory: it needs more than {limit}", hint="give more --memory")
    errors.seek(0)
    tail = errors.read().decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
    return BenchError(f"{name} died (status {status}): {' | '.join(tail) or 'without a word'}")
