"""`expertd replay`: a recorded trace against cache policies and budgets. `cache.replay` and `cache.skew` compute; here
are the words of the command line, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expertd.errors import UsageError
from expertd.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from expertd.cache.replay import Row
    from expertd.cache.skew import Skew, SkewReport
    from expertd.cache.trace import Trace

_BUDGETS = "10%,15%,25%,35%,50%"
_PHASES = {"prompt": 0, "decode": 1}


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    default="lru,auto,belady",
    show_default=True,
    metavar="NAMES",
    help="Policies, comma-separated; belady is the best that is possible in hindsight, all is every one.",
)
@click.option(
    "--budget",
    default=_BUDGETS,
    show_default=True,
    metavar="SIZES",
    help="Budgets, comma-separated: bytes with a unit, or percent of all experts' bytes.",
)
@click.option(
    "--phase",
    type=click.Choice([*_PHASES, "all"]),
    default="decode",
    show_default=True,
    help="Which requests to count. All are replayed, into an empty cache.",
)
@click.option("--disk-speed", default="1.5GB/s", show_default=True, metavar="SIZE", help="For the seconds of reading.")
@click.option("--layers", is_flag=True, help="Hits of each layer too.")
@click.option("--skew", is_flag=True, help="Tell how concentrated routing is and whether pinning or warming can help.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="OUT.SVG", help="Draw hit ratio over budget.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    trace: Path,
    policy: str,
    budget: str,
    phase: str,
    disk_speed: str,
    layers: bool,
    skew: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Tell what cache policies would have read for the routes recorded in TRACE.

    TRACE is a file of `expertd trace export`, in either form, or another route CSV with the same columns.
    """  # fmt: skip
    from expertd.cache.skew import measure
    from expertd.runtime.trace_load import load_trace
    from expertd.types import Phase

    policies, speed = _policies(policy), _speed(disk_speed)
    if plot is not None:
        _check_plot(plot)
    recorded = load_trace(trace)
    total = sum(recorded.sizes())
    budgets = _budgets(budget, total)
    chosen = None if phase == "all" else Phase(_PHASES[phase])
    routes = recorded.selected(chosen)
    if not routes:
        raise UsageError(f"{trace} has no routes of phase {phase}", hint="give --phase all")
    rows = _replay(recorded, policies, budgets, chosen)
    skewed = measure(routes, recorded.n_experts) if skew else None
    if as_json:
        click.echo(json.dumps(_report(recorded, phase, speed, rows, skewed, layers), indent=2))
    else:
        _show(recorded, phase, speed, rows, skewed, layers)
    if plot is not None:
        _draw(plot, recorded, rows, total, phase, chosen)
        click.echo(f"wrote {plot}", err=True)


def _policies(text: str) -> list[str]:
    from expertd.cache.replay import check_policy, policy_names

    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if names == ["all"]:
        return policy_names()
    if not names:
        raise UsageError("--policy names none", hint="known are " + ", ".join(policy_names()))
    for name in names:
        check_policy(name)
    return names


def _budgets(text: str, total: int) -> list[int]:
    found = []
    for word in (w.strip() for w in text.split(",")):
        if word.endswith("%"):
            try:
                nbytes = round(float(word[:-1]) / 100 * total)
            except (ValueError, OverflowError) as error:
                raise UsageError(f"{word!r} is no budget", hint="write percent or a size: 25%, 4GiB") from error
        else:
            nbytes = parse_size(word)
        if nbytes <= 0:
            raise UsageError(f"a budget of {word} is none", hint="write percent or a size: 25%, 4GiB")
        found.append(nbytes)
    return list(dict.fromkeys(found))


def _speed(text: str) -> int:
    speed = parse_size(text.removesuffix("/s"))
    if speed <= 0:
        raise UsageError(f"--disk-speed {text} is none")
    return speed


def _check_plot(path: Path) -> None:
    from expertd.bench.plots import check_available

    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot {path}: only .svg can be drawn")
    check_available("a plot")


def _replay(trace: Trace, policies: Sequence[str], budgets: Sequence[int], phase: Any) -> list[Row]:
    """A row for each pair, a policy's budgets beside each other."""
    from expertd.cache.replay import replay

    pairs = [(name, nbytes) for name in policies for nbytes in budgets]
    if not sys.stderr.isatty():
        return [replay(trace, name, nbytes, phase) for name, nbytes in pairs]
    from rich.console import Console
    from rich.progress import track

    shown = track(pairs, "replaying", console=Console(stderr=True), transient=True)
    return [replay(trace, name, nbytes, phase) for name, nbytes in shown]


def _report(
    trace: Trace, phase: str, speed: int, rows: Sequence[Row], skew: SkewReport | None, layers: bool
) -> dict[str, Any]:
    from expertd.types import Phase

    report: dict[str, Any] = {
        "trace": trace.name,
        "model": trace.model,
        "layers": trace.n_layers,
        "experts": trace.n_experts,
        "experts_used": trace.k,
        "expert_bytes": sum(trace.sizes()),
        "prompt_tokens": trace.n_tokens(Phase.PREFILL),
        "decode_tokens": trace.n_tokens(Phase.DECODE),
        "phase": phase,
        "disk_bytes_per_second": speed,
        "rows": [_row(r, speed, layers) for r in rows],
    }
    if skew is not None:
        report["skew"] = {
            "tokens": skew.tokens,
            "helps": skew.helps,
            "verdict": skew.verdict,
            **_skew(skew.overall),
            "layers": [{"layer": s.layer, **_skew(s)} for s in skew.layers],
        }
    return report


def _row(r: Row, speed: int, layers: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": r.policy,
        "in_charge": r.in_charge,
        "budget_bytes": r.budget_bytes,
        "requests": r.requests,
        "hits": r.hits,
        "hit_ratio": r.hit_ratio,
        "bytes_read": r.bytes_read,
        "read_seconds": r.bytes_read / speed,
    }
    if layers:
        row["layers"] = [
            {"layer": i, "requests": n, "hits": hits, "hit_ratio": hits / n}
            for i, (n, hits) in enumerate(zip(r.layer_requests, r.layer_hits, strict=True))
            if n
        ]
    return row


def _skew(s: Skew) -> dict[str, Any]:
    from expertd.cache.skew import SHARES

    def by_share(values: Sequence[float]) -> dict[str, float]:
        return {f"{round(100 * share)}%": value for share, value in zip(SHARES, values, strict=True)}

    return {"requests": s.requests, "taken": by_share(s.taken), "lasting": by_share(s.lasting)}


def _show(trace: Trace, phase: str, speed: int, rows: Sequence[Row], skew: SkewReport | None, layers: bool) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from expertd.cli.inspect import printable
    from expertd.types import Phase

    total = sum(trace.sizes())
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(printable(
        f"{trace.model or trace.name}: {trace.n_layers} layers x {trace.n_experts} experts, {trace.k} used, "
        f"{format_size(total)}; {trace.n_tokens(Phase.PREFILL)} prompt and {trace.n_tokens(Phase.DECODE)} decoded "
        f"tokens, counted: {phase}"
    ))  # fmt: skip
    table = Table("policy", "budget", "of all", "requests", "hits", "hit ratio", "read", "in", box=SIMPLE)
    for r in rows:
        name = r.in_charge if r.in_charge.startswith(r.policy) else f"{r.policy}: {r.in_charge}"
        table.add_row(
            name, format_size(r.budget_bytes), f"{100 * r.budget_bytes / total:.0f} %", str(r.requests), str(r.hits),
            f"{r.hit_ratio:.3f}", format_size(r.bytes_read), format_seconds(r.bytes_read / speed),
        )  # fmt: skip
    console.print(table)
    if layers:
        console.print(_layer_table(rows))
    if skew is not None:
        console.print(_skew_table(skew, layers))
        console.print(printable(skew.verdict))


def _layer_table(rows: Sequence[Row]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("layer", *(f"{r.policy} {format_size(r.budget_bytes)}" for r in rows), box=SIMPLE)
    for layer, n in enumerate(rows[0].layer_requests):
        if n:
            table.add_row(str(layer), *(f"{r.layer_hits[layer] / r.layer_requests[layer]:.3f}" for r in rows))
    return table


def _skew_table(report: SkewReport, layers: bool) -> Any:
    """What the hottest take of all requests, and what the first half's hottest take of the second half's."""
    from rich.box import SIMPLE
    from rich.table import Table

    from expertd.cache.skew import SHARES

    columns = [f"{round(100 * s)} % {word}" for word in ("take", "last") for s in SHARES]
    table = Table("hottest", *columns, box=SIMPLE)
    for s in (report.overall, *(report.layers if layers else ())):
        name = "all layers" if s.layer < 0 else f"layer {s.layer}"
        table.add_row(name, *(f"{100 * v:.0f} %" for v in (*s.taken, *s.lasting)))
    return table


def _draw(path: Path, trace: Trace, rows: Sequence[Row], total: int, phase: str, chosen: Any) -> None:
    """The rows as curves; the roof is drawn although it was not asked for."""
    from expertd.bench.plots import curves
    from expertd.cache.replay import BELADY
    from expertd.runtime.profile_file import write_atomically

    drawn = list(rows)
    if all(r.policy != BELADY for r in rows):
        drawn += _replay(trace, [BELADY], list(dict.fromkeys(r.budget_bytes for r in rows)), chosen)
    groups: dict[str, list[tuple[float, float]]] = {}
    for r in drawn:
        groups.setdefault(r.policy, []).append((100 * r.budget_bytes / total, r.hit_ratio))
    title = f"{trace.model or Path(trace.name).name}: requests that hit ({phase})"
    write_atomically(path, curves(title, "budget, % of the experts", "hit ratio", groups, BELADY).encode())
