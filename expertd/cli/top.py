"""`expertd top`: a running daemon twice a second, on a terminal as a screen, elsewhere as a line a point or as JSON.

Here are the loop, the keys and the plain lines; what the screen looks like is `screen`'s. A daemon that goes away is
waited for: the screen says so and goes on when it is back.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from expertd.cli.client import DaemonClient, daemon_options
from expertd.errors import EXIT_OK, NotReadyError
from expertd.units import format_size

_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_KEPT = 900
_BYTES = "application/octet-stream"
_QUIT = ("q", "Q", "\x1b", "\x03", "")


@dataclass
class Look:
    """What is known of the daemon: its last answer, the points so far, the map. `away` is since when it does not answer
    (seconds since 1970; 0 while it does)."""

    now: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    points: list[list[float | None]] = field(default_factory=list)
    fresh: list[list[float | None]] = field(default_factory=list)
    """Points that the last look brought; of those before the first look, the last."""
    layers: list[int] = field(default_factory=list)
    n_experts: int = 0
    cells: bytes = b""
    away: float = 0.0
    restarted: float = 0.0
    """When the daemon was started again while it was looked at; 0 where it was not."""

    def value(self, name: str) -> float | None:
        """A figure of the last point."""
        return self.points[-1][self.now["columns"].index(name)] if self.points else None


class Watcher:
    """Asks the daemon. `look` raises NotReadyError only while it was never there."""

    def __init__(self, client: DaemonClient, *, with_map: bool) -> None:
        self._client, self._with_map = client, with_map
        self._run, self._tag = "", ""
        self.found = Look()

    def look(self) -> Look:
        found = self.found
        try:
            self._ask(found)
            found.away = 0.0
        except NotReadyError:
            if not found.now:
                raise
            found.away, found.fresh = found.away or time.time(), []
        return found

    def _ask(self, found: Look) -> None:
        since = f"?since={found.now['last']}" if self._run else ""
        now = self._client.get(f"/expertd/series{since}")
        if self._run and now["run"] != self._run:
            now, found.restarted = self._client.get("/expertd/series"), now["started_at"]
            found.model, self._tag = None, ""
        self._run = now["run"]
        if found.model is None and now["state"] != "loading":
            found.model = self._client.get("/expertd/status")["model"]
        found.fresh = now["points"] if found.now else now["points"][-1:]
        found.now, found.points = now, (found.points + now["points"])[-_KEPT:]
        if self._with_map:
            self._ask_map(found)

    def _ask_map(self, found: Look) -> None:
        answer = self._client.content("/expertd/heatmap", _BYTES, self._tag)
        if answer is None:
            return
        found.cells, headers = answer
        self._tag = headers.get("etag", "")
        found.layers = [int(n) for n in headers.get("x-expertd-layers", "").split(",") if n]
        found.n_experts = int(headers.get("x-expertd-experts", "0"))


@click.command("top")
@daemon_options
@click.option("--interval", type=click.FloatRange(0.1, 60), default=_SECONDS, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(1), help="End after so many looks.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a look.")
def command(socket: Path | None, url: str | None, interval: float, count: int | None, as_json: bool) -> int:
    """Watch a running daemon in the terminal; q quits."""
    client = DaemonClient(socket, url, seconds=_ANSWER_SECONDS)
    screen = sys.stdout.isatty() and not as_json
    watcher = Watcher(client, with_map=screen)
    with contextlib.closing(client), contextlib.suppress(KeyboardInterrupt):
        if screen:
            _on_screen(watcher, interval, count)
        else:
            _in_lines(watcher, interval, count, _json if as_json else _lines)
    return EXIT_OK


def _on_screen(watcher: Watcher, interval: float, count: int | None) -> None:
    from rich.live import Live

    from expertd.cli.screen import Screen

    picture = Screen(watcher.look())
    with _keys() as pressed, Live(picture, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        looks = 1
        live.refresh()
        while (count is None or looks < count) and pressed(interval) not in _QUIT:
            watcher.look()
            looks += 1
            live.refresh()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """A function that waits so many seconds for a key: None where none was pressed, "" at the end of input."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda seconds: sys.stdin.read(1) if select.select([fd], [], [], seconds)[0] else None
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _in_lines(watcher: Watcher, interval: float, count: int | None, tell: Callable[[Look], list[str]]) -> None:
    looks, before = 0, ""
    while True:
        for text in tell(watcher.look()):
            if text != before:
                click.echo(text)
            before = text
        sys.stdout.flush()
        looks += 1
        if looks == count:
            return
        time.sleep(interval)


def _json(look: Look) -> list[str]:
    """The daemon's answer as it came, and whether it came."""
    return [json.dumps({"away": bool(look.away), **look.now})]


def _lines(look: Look) -> list[str]:
    """A line for each new point; before the first one, and while there is no answer, what there is to say."""
    if look.away:
        return [f"{_clock(look.away)} no answer"]
    if not look.points:
        return [f"{_clock(look.now['started_at'])} {look.now['state']}"]
    columns = look.now["columns"]
    return [line(dict(zip(columns, point, strict=True)), look.now) for point in look.fresh]


def line(point: dict[str, float | None], now: dict[str, Any]) -> str:
    """One point for a log or a pipe."""
    cache, verdict = now["cache"], now["verdict"]
    held = ""
    if cache["steering"]:
        held = f"  {format_size(cache['resident_bytes'])} of {format_size(cache['budget_bytes'])} held"
    return (
        f"{_clock(point['at'] or 0)} {now['state']:<8} {say(point['tokens_per_second']):>6} tok/s"
        f"  {share(point['hit_ratio']):>7} hits  {size(point['disk_read_bytes_per_second']):>9}/s read"
        f"  {say(point['major_faults_per_second']):>6} faults/s{held}  {verdict['sentence']}"
    )


def say(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def size(value: float | None) -> str:
    return "-" if value is None else format_size(value)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
