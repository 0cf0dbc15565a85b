"""What `expertd top` draws: verdict, map, figures with their last minutes, memory, the request. Nothing is asked here.

The map takes what height is left; where it is too small for all layers or experts, neighbours share a cell and the
hottest of them that is in memory shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from expertd.cli.top import say, share, size
from expertd.units import format_seconds, format_size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from expertd.cli.top import Look

_RAMPS = (
    ("#1c212a", "#566072"),
    ("#33245c", "#84308f", "#dc4a60", "#ff9d4d", "#ffe9a3"),
    ("#10544c", "#22b29a", "#a6f7e4"),
    ("#2f86ff", "#8cc4ff"),
)
"""On disk, resident, pinned, just missed: from cold to hot, as on the dashboard."""
_GAMMA = 1.8
_BARS = "▁▂▃▄▅▆▇█"
_FIGURES: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("tokens", "tokens_per_second", "tok/s", say),
    ("hit ratio", "hit_ratio", "", share),
    ("disk", "disk_read_bytes_per_second", "/s", size),
    ("faults", "major_faults_per_second", "/s", say),
    ("waiting", "wait_share", "of the time", share),
    ("stalls", "stall_share", "of the time", share),
)
_KINDS = (
    ("dense, locked", "dense_locked", "#b18cff"), ("dense", "dense", "#6f5a9e"), ("pinned", "pinned", "#2fc4ac"),
    ("resident", "resident", "#ffb454"), ("KV cache", "kv", "#58a6ff"), ("everything else", "other", "#929cab"),
    ("free", "free", "#2a303a"),
)  # fmt: skip
_CALM = ("compute", "idle", "starting", "cold", "topic", "prompt")
_FRAME_ROWS = 4
"""The map's border, its legend, and the line that the terminal keeps free."""
_FEWEST_ROWS = 3
_NARROW = 74


class Screen:
    """Renders one `Look`, which changes under it."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look, width = self._look, options.max_width
        above, below = Group(_head(look), _verdict(look)), Group(_below(look, width), Text(" q quits", style="dim"))
        yield above
        if look.cells:
            taken = sum(len(console.render_lines(part, options, pad=False)) for part in (above, below))
            yield _map(look, width - 4, max(_FEWEST_ROWS, options.size.height - taken - _FRAME_ROWS))
        yield below


def _head(look: Look) -> Table:
    now, model = look.now, look.model
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    name = f"{model['id']} · {model['description']} · {format_size(model['nbytes'])}" if model else ""
    state = Text(f" {now['state']}", style="bold green" if now["state"] == "ready" else "bold yellow")
    if look.away:
        state = Text(f" no answer since {time.strftime('%H:%M:%S', time.localtime(look.away))}", style="bold red")
    elif look.restarted:
        state.append(f" (started again at {time.strftime('%H:%M:%S', time.localtime(look.restarted))})", "yellow")
    up = "" if look.away else f"up {format_seconds(now['now'] - now['started_at'])} "
    head.add_row(Text.assemble((" expertd ", "bold"), (name, "dim"), state), Text(up, style="dim"))
    return head


def _verdict(look: Look) -> Panel:
    verdict = look.now["verdict"]
    before = look.now.get("last_busy") if verdict["cause"] == "idle" else None
    words = Text(look.now["failure"] or verdict["sentence"], style="bold")
    if verdict["advice"]:
        words.append(f"\n{verdict['advice']}", "not bold dim")
    if before:
        words.append(f"\nBefore: {before['sentence']}", "not bold dim")
    colour = "red" if verdict["thrashing"] or look.away else "green" if verdict["cause"] in _CALM else "yellow"
    title = verdict["cause"].replace("_", "-") + (", thrashing" if verdict["thrashing"] else "")
    return Panel(words, title=title, title_align="left", border_style=colour)


def _map(look: Look, width: int, height: int) -> Panel:
    rows, columns = len(look.layers), look.n_experts
    per_column = -(-columns // width)
    per_row = -(-rows // (2 * height))
    wide = max(1, min(3, width // -(-columns // per_column)))
    lines = binned(look.cells, rows, columns, per_row, per_column)
    experts = look.now["cache"]["experts"]
    missed = sum(1 for cell in look.cells if cell >> 6 == 3)
    title = f"{rows} layers x {columns} experts: {experts['resident']} resident, {experts['pinned']} pinned"
    legend = Text.assemble(
        *((f"{word} ", _cell(cell, cell)) if mark else (f"{word}  ", "dim") for cell, word, mark in _legend()),
        (f"{missed} just missed" if missed else "", "dim"),
    )
    return Panel(
        Group(Segments(_half_blocks(lines, wide)), legend), title=title, title_align="left", border_style="dim"
    )


def _legend() -> Iterable[tuple[int, str, bool]]:
    for state, word in enumerate(("on disk", "resident", "pinned", "missed")):
        yield state << 6 | 40, "  ", True
        yield 0, word, False


def binned(cells: bytes, rows: int, columns: int, per_row: int, per_column: int) -> list[list[int]]:
    """The map with `per_row` layers and `per_column` experts in a cell."""
    out = []
    for row in range(0, rows, per_row):
        line = []
        for column in range(0, columns, per_column):
            here = [
                cells[r * columns + c]
                for r in range(row, min(row + per_row, rows))
                for c in range(column, min(column + per_column, columns))
            ]
            line.append(max(here, key=lambda cell: (cell >> 6 != 0, cell & 63)))
        out.append(line)
    return out


def _half_blocks(lines: list[list[int]], wide: int) -> Iterable[Segment]:
    """Two rows of cells in each line of text; equal neighbours are one segment."""
    for top in range(0, len(lines), 2):
        upper, lower = lines[top], lines[top + 1] if top + 1 < len(lines) else None
        run, last = 0, None
        for i, cell in enumerate(upper):
            pair = (cell, lower[i] if lower else None)
            if pair != last and last is not None:
                yield Segment("▀" * wide * run, _cell(*last))
                run = 0
            run, last = run + 1, pair
        if last is not None:
            yield Segment("▀" * wide * run, _cell(*last))
        yield Segment.line()


@lru_cache(maxsize=65536)
def _cell(upper: int, lower: int | None) -> Style:
    return Style(color=colour(upper), bgcolor=None if lower is None else colour(lower))


def colour(cell: int) -> str:
    """Of a cell's byte: two bits of state above six bits of heat."""
    stops = _RAMPS[cell >> 6]
    place = ((cell & 63) / 63) ** _GAMMA * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    pairs = [(int(stops[low][i : i + 2], 16), int(stops[low + 1][i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs)


def _below(look: Look, width: int) -> Table:
    """Figures beside memory and request; one above the other where the terminal is narrow."""
    figures, rest = _figures(look, width), Group(_request(look), _memory(look))
    if width < _NARROW:
        stacked = Table.grid(expand=True)
        stacked.add_row(figures)
        stacked.add_row(rest)
        return stacked
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    grid.add_row(figures, rest)
    return grid


def _figures(look: Look, width: int) -> Panel:
    table = Table.grid(padding=(0, 1))
    room = max(8, (width if width < _NARROW else width * 3 // 5) - 40)
    for title, name, unit, words in _FIGURES:
        column = look.now["columns"].index(name)
        values = [point[column] for point in look.points[-room:]]
        table.add_row(
            Text(title, style="dim"), Text(words(look.value(name)), style="bold", justify="right"),
            Text(unit, style="dim"), Text(sparkline(values), style="cyan"),
        )  # fmt: skip
    return Panel(table, title="last minutes", title_align="left", border_style="dim")


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from 0 to the largest; blank for nothing."""
    top = max((v for v in values if v), default=0.0)
    return "".join(" " if v is None else _BARS[round(v / top * (len(_BARS) - 1))] if top else _BARS[0] for v in values)


def _request(look: Look) -> Panel:
    running, *waiting = look.now["slots"]
    if not running["is_processing"]:
        words = Text("idle", style="dim")
    elif running["n_decoded"]:
        words = Text(f"writing: {running['n_decoded']} tokens, {format_seconds(running['running_seconds'])}")
    else:
        words = Text(f"reading: {running['n_prompt_done']} of {running['n_prompt_tokens']} tokens")
    if waiting:
        words.append(f"; {len(waiting)} waiting", "yellow")
    return Panel(words, title="request", title_align="left", border_style="dim")


def _memory(look: Look) -> Panel:
    memory = look.now["memory"]
    table = Table.grid(padding=(0, 1))
    if not memory:
        return Panel(Text("not known yet", style="dim"), title="memory", title_align="left", border_style="dim")
    for word, name, tint in _KINDS:
        if memory[name] or name == "free":
            table.add_row(Text("■", style=tint), word, Text(format_size(memory[name]), justify="right"))
    return Panel(table, title=f"memory of {format_size(memory['limit'])}", title_align="left", border_style="dim")
