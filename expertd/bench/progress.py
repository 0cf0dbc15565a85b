"""What a person sees while a benchmark runs: a bar on a terminal, plain lines elsewhere. Always on standard error, so
that `--json` has standard output to itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from expertd.bench.modelfile import Progress
from expertd.bench.results import METRICS
from expertd.bench.spec import Arm, Run
from expertd.units import format_size


class Screen(Protocol):
    """Lines and bars."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def bar(self, what: str, total: int) -> Any:
        """A context manager whose value is called with how much is done."""


def screen() -> Screen:
    """The one that fits standard error."""
    return _Terminal() if sys.stderr.isatty() else _Lines()


class _Lines:
    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Any]:
        self.say(what)
        yield lambda done: None


class _Terminal:
    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Any]:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True) as shown:
            task = shown.add_task(what, total=total)
            yield lambda done: shown.update(task, completed=done)


@contextmanager
def writing(shown: Screen, name: str, nbytes: int) -> Iterator[Progress]:
    """A bar for a model file that is being written."""
    with shown.bar(f"writing {name}, {format_size(nbytes)}", nbytes) as update:
        yield lambda done, total: update(done)


class RunWatch:
    """Shows a comparison's runs (an `ab.Watch`). `total` is the number of runs, `tokens` that of a run."""

    def __init__(self, shown: Screen, total: int, tokens: int) -> None:
        self._shown, self._total, self._tokens = shown, total, tokens
        self._bar: Any = None
        self._update: Any = None
        self._done = 0
        self._name = ""

    def begins(self, arm: Arm, number: int) -> None:
        self._name = f"run {number + 1}/{self._total} {arm.name}"
        self._done = 0
        self._bar = self._shown.bar(self._name, self._tokens)
        self._update = self._bar.__enter__()

    def line(self, line: dict[str, Any]) -> None:
        if line["at"] in ("first", "token"):
            self._done += 1
            self._update(self._done)

    def ends(self, arm: Arm, run: Run) -> None:
        self.close()
        speed, first = METRICS["tokens_per_second"](run), METRICS["ttft_seconds"](run)
        bound = "" if run.finished else "at most "
        told = f"{bound}{speed:.3g} tokens/s" if speed else "nothing"
        hits = METRICS["hit_ratio"](run)
        extra = f", {hits:.0%} hits" if hits is not None else ""
        if not run.finished:
            extra += f", ended after {run.wall_seconds:.0f} s"
        waited = f", first token {first:.2f} s" if first is not None else ""
        self._shown.say(f"{self._name}: {told}{waited}{extra}")

    def close(self) -> None:
        """Take the bar away, also after an error."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
