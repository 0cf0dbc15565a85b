"""Draws a map of layers x experts: in colours on a terminal, in characters elsewhere, with matplotlib into a file.

An expert's heat is its chance of use against that of even routing, so that 1 is ordinary in every model. Not here:
where the map comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.errors import StateError, UsageError

if TYPE_CHECKING:
    from rich.text import Text

_SHADES = " .:-=+*#%@"
_COLOURS = ("#0b0724", "#2a0f54", "#5a1a6b", "#8c2a67", "#bf3b55", "#e3593a", "#f58b21", "#fbc02d", "#fdf0a0")
_COLD, _HOT = 0.25, 8.0
"""Times even routing at which the scale begins and ends; it is logarithmic between."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """`rows[i]` are the heats of layer `layers[i]`, in times even routing."""

    title: str
    layers: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]


def heat_map(title: str, chances: Sequence[float], n_experts: int, n_used: int, *, by_heat: bool = False) -> HeatMap:
    """From chances of use by expert id; layers without any are left out. `by_heat` sorts each row."""
    layers, rows = [], []
    even = n_used / n_experts
    for first in range(0, len(chances), n_experts):
        row = [c / even for c in chances[first : first + n_experts]]
        if any(row):
            layers.append(first // n_experts)
            rows.append(tuple(sorted(row, reverse=True) if by_heat else row))
    return HeatMap(title, tuple(layers), tuple(rows))


def _level(heat: float, steps: int) -> int:
    """0 for never used, 1 to steps - 1 on the scale."""
    if heat <= 0:
        return 0
    place = math.log(max(_COLD, min(_HOT, heat)) / _COLD) / math.log(_HOT / _COLD)
    return 1 + round(place * (steps - 2))


def _narrowed(rows: Sequence[Sequence[float]], width: int) -> list[list[float]]:
    """Rows of at most `width` cells, each the hottest of its experts."""
    longest = max((len(r) for r in rows), default=0)
    step = max(1, math.ceil(longest / max(1, width)))
    return [[max(row[i : i + step]) for i in range(0, len(row), step)] for row in rows]


def as_characters(heat: HeatMap, width: int) -> list[str]:
    """One line a layer, one character an expert: blank for never used, @ for the hottest."""
    rows = _narrowed(heat.rows, width - 6)
    return [
        f"{layer:>4}  " + "".join(_SHADES[_level(h, len(_SHADES))] for h in row)
        for layer, row in zip(heat.layers, rows, strict=True)
    ]


def as_colours(heat: HeatMap, width: int) -> Text:
    """Two layers a line: the upper half of a cell is one, the lower half the next."""
    from rich.text import Text

    rows, text = _narrowed(heat.rows, width - 6), Text()
    for i in range(0, len(rows), 2):
        text.append(f"{heat.layers[i]:>4}  ", style="dim")
        below = rows[i + 1] if i + 1 < len(rows) else None
        for n, upper in enumerate(rows[i]):
            colour = _COLOURS[_level(upper, len(_COLOURS))]
            under = f" on {_COLOURS[_level(below[n], len(_COLOURS))]}" if below is not None and n < len(below) else ""
            text.append("▀", style=colour + under)
        text.append("\n")
    text.append("      never ", style="dim")
    for colour in _COLOURS:
        text.append("█", style=colour)
    text.append(f" {_HOT:.0f} times even routing", style="dim")
    return text


def plot(heat: HeatMap, path: Path) -> None:
    """Writes a PNG or SVG, by the ending. UsageError without matplotlib or for another ending, StateError where the
    file cannot be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"{path.name}: a plot is a .png or an .svg", hint="name the file so")
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a plot needs matplotlib", hint="pip install 'expertd[plots]'") from error
    longest = max((len(r) for r in heat.rows), default=1)
    cells = [[_level(h, 64) for h in row] + [0] * (longest - len(row)) for row in heat.rows]
    figure = Figure(figsize=(max(5.0, longest / 14), max(2.2, len(cells) / 8 + 1.2)), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["inferno"].resampled(64)(range(64))
    image = axes.imshow(cells, cmap=ListedColormap(colours), vmin=0, vmax=63, aspect="auto", interpolation="nearest")
    axes.set(title=heat.title, xlabel="expert", ylabel="layer")
    step = max(1, len(cells) // 16)
    axes.set_yticks(range(0, len(cells), step), [str(n) for n in heat.layers[::step]])
    marks = (_COLD, 0.5, 1.0, 2.0, 4.0, _HOT)
    bar = figure.colorbar(image, ax=axes, ticks=[0, *(_level(m, 64) for m in marks)])
    bar.ax.set_yticklabels(["never", *(f"{m:g}x" for m in marks)])
    bar.set_label("use against even routing")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error.strerror}") from error
