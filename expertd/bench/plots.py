"""Plots for reports, as SVG text that stands in a page by itself.

By matplotlib (the extra `plots`), as `expertd replay --plot` does: axes, ticks and legends are its trade, and a
person who wants another plot has the JSON. It is imported when a report is asked for, never at start.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from expertd.errors import UsageError

_COLOURS = ("#7a7f87", "#0b6e4f", "#b5651d", "#4a5fa5", "#8e3b6e", "#3b8e8a")
_WIDTH, _HEIGHT = 7.4, 3.0

Groups = Mapping[str, Sequence[float]]
"""Values by the name of what they belong to, one a run."""


def check_available(what: str = "a report") -> None:
    """Raises UsageError when matplotlib is missing: better before an hour of measuring than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UsageError(f"{what} needs matplotlib", hint="pip install 'expertd[plots]'") from e


def bars(title: str, unit: str, groups: Groups) -> str:
    """A bar at each group's median, and a dot for each of its values."""
    import statistics

    figure, axes = _figure(title, _HEIGHT * 0.35 + 0.45 * len(groups))
    names = list(groups)
    for i, name in enumerate(names):
        values = groups[name]
        if not values:
            continue
        middle = statistics.median(values)
        axes.barh(i, middle, color=_colour(i), alpha=0.75, height=0.55)
        axes.plot(values, [i] * len(values), "o", color="#222222", markersize=4)
        axes.annotate(
            f"{middle:.3g}",
            (max(*values, middle), i),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    return _svg(figure, title)


def lines(title: str, x_label: str, y_label: str, groups: Groups) -> str:
    """A line for each group on a logarithmic scale, over the values' numbers."""
    figure, axes = _figure(title, _HEIGHT)
    for i, (name, values) in enumerate(groups.items()):
        axes.plot(range(1, len(values) + 1), values, color=_colour(i), linewidth=1.1, label=name)
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return _svg(figure, title)


def shares(title: str, x_label: str, groups: Groups) -> str:
    """For each group, the share of its values that are at most x."""
    figure, axes = _figure(title, _HEIGHT)
    for i, (name, values) in enumerate(groups.items()):
        if values:
            ordered = sorted(values)
            heights = [(n + 1) / len(ordered) for n in range(len(ordered))]
            axes.step(ordered, heights, where="post", color=_colour(i), label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    if any(groups.values()):
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    return _svg(figure, title)


def curves(
    title: str, x_label: str, y_label: str, groups: Mapping[str, Sequence[tuple[float, float]]], roof: str
) -> str:
    """A line through each group's (x, y) points, y from 0 to 1; that of the group `roof` is dashed and grey."""
    figure, axes = _figure(title, 1.4 * _HEIGHT)
    for i, (name, points) in enumerate(groups.items()):
        x, y = zip(*sorted(points), strict=True)
        colour, dashes = (_COLOURS[0], "--") if name == roof else (_COLOURS[1 + i % (len(_COLOURS) - 1)], "-")
        axes.plot(x, y, dashes, color=colour, marker="o", markersize=3.5, linewidth=1.3, label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return _svg(figure, title)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _figure(title: str, height: float) -> tuple[Any, Any]:
    # The object interface, not pyplot: no display is looked for and nothing global is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    import matplotlib

    out = io.StringIO()
    # Text stays text, and ids differ between the plots of a page, since they are one document there.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(title)}" ', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
