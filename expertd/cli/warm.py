"""`expertd warm`: bring a model's weights into the page cache, without a daemon and without llama.cpp.

For whoever runs llama-server, ollama or anything else that maps the same file: the page cache is shared. Where a daemon
serves the model it is asked instead (`cli.warm_daemon`). What is read and in which order lives in `pages.warming`; this
file parses, shows and prints.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expertd.cli.client import daemon_options
from expertd.cli.warm_daemon import Wish, through_daemon
from expertd.errors import EXIT_FAILED, EXIT_OK, UsageError
from expertd.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from expertd.pages.mapping import MappedFiles
    from expertd.pages.pager import Pager
    from expertd.pages.warming import Skip, Verdict, WarmPlan, WarmProgress
    from expertd.types import ExpertLayout

_SAY_SECONDS = 2.0
_LOOK_SECONDS = 1.0


@click.command("warm")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--profile", metavar="NAME", help="The experts of a saved hot map, hottest first.")
@click.option("--dense", "only_dense", is_flag=True, help="Only the weights that every token uses.")
@click.option("--all", "everything", is_flag=True, help="All experts, whatever memory there is.")
@click.option("--budget", default="auto", show_default=True, metavar="SIZE", help="Bytes of experts at most, or auto.")
@click.option("--pin", is_flag=True, help="Lock what the limit on locked memory allows, while this process lives.")
@click.option("--hold", is_flag=True, help="Stay and keep the pins until interrupted. Implies --pin.")
@click.option("--drop", is_flag=True, help="Drop the model from the page cache instead.")
@click.option("--state", type=click.Path(path_type=Path), help="Take the profile from this state directory's files.")
@click.option("--local", is_flag=True, help="Ask no daemon, even where one serves the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@daemon_options
def command(
    model: Path | None, profile: str | None, only_dense: bool, everything: bool, budget: str, pin: bool, hold: bool,
    drop: bool, state: Path | None, local: bool, as_json: bool, socket: Path | None, url: str | None,
) -> int:  # fmt: skip
    """Bring MODEL into the page cache: dense weights first, then experts up to the budget. A running daemon that
    serves MODEL does it itself, within its budget; without MODEL it is the one that a running daemon serves.

    Works on any shard of a split model. What is there already is not read again, so that an interrupted run goes on
    where it ended. Exits 1 when what was asked for is not resident afterwards.
    """
    _check(only_dense, everything, profile, budget)
    if drop and (pin or hold or only_dense or everything or profile):
        raise UsageError("--drop takes no other option", hint="run it alone")
    if state is not None and profile is None:
        raise UsageError("--state says where a profile is", hint="name it with --profile")
    if not local and state is None:
        level = "dense" if only_dense else "all" if everything or profile is None else "profile"
        wish = Wish(model, profile, level, budget, pin, hold, drop, as_json)
        if (code := through_daemon(wish, socket, url)) is not None:
            return code
    if model is None:
        raise UsageError("no model is named", hint="give MODEL, or start a daemon")
    from expertd.model.expertmap import build_map
    from expertd.model.gguf import read_model
    from expertd.pages.mapping import MappedFiles
    from expertd.pages.pager import Pager
    from expertd.pages.warming import plan_warm

    layout = build_map(read_model(model)).layout()
    with MappedFiles.map(layout.files) as mapping:
        pager = Pager(layout, mapping)
        try:
            if drop:
                return _drop(pager, as_json)
            hottest = () if only_dense else _hottest(profile, model, state) if profile is not None else None
            plan = plan_warm(layout, experts=hottest, budget_bytes=_budget(layout, only_dense or everything, budget))
            return _warm(pager, plan, pin or hold, hold, as_json)
        finally:
            pager.close()


def _check(only_dense: bool, everything: bool, profile: str | None, budget: str) -> None:
    if only_dense + everything + (profile is not None) > 1:
        raise UsageError("--dense, --all and --profile exclude each other", hint="give one of them")
    if budget != "auto":
        if only_dense or everything:
            raise UsageError("a budget bounds experts; it goes with neither --dense nor --all", hint="leave one out")
        parse_size(budget)


def _hottest(profile: str, model: Path, state: Path | None) -> list[int]:
    """Experts of a profile: of the state directory that was named, else of the running daemon, else of the user's."""
    from expertd.cli.profile_store import Where, open_store

    return open_store(Where(None, None, state, model)).get(profile).hottest()


def _budget(layout: ExpertLayout, unbounded: bool, budget: str) -> int | None:
    """Bytes of experts; None for no bound. `auto` is what can be used now, less dense weights and a reserve."""
    from expertd.pages import memory
    from expertd.pages.budget import reserve_for

    if unbounded:
        return None
    if budget != "auto":
        return parse_size(budget)
    now = memory.snapshot()
    return max(0, now.usable_bytes - layout.dense_nbytes - reserve_for(now.limit_bytes, 0))


def _warm(pager: Pager, plan: WarmPlan, pin: bool, hold: bool, as_json: bool) -> int:
    from expertd.pages.warming import WarmProgress, verify, warm_steps

    pager.calibrate()
    progress = WarmProgress(plan.target_bytes)
    started = time.monotonic()
    cancelled = False
    with Shown(progress, quiet=as_json) as shown:
        try:
            for _ in warm_steps(pager, plan, progress, pin=pin):
                shown.update()
        except KeyboardInterrupt:
            cancelled = True
    seconds = time.monotonic() - started
    verdict = verify(pager, plan)
    report = _report(plan, progress, verdict, seconds, cancelled)
    print_report(report, as_json)
    short = verdict.resident_bytes is not None and bool(verdict.missing)
    if cancelled:
        say("interrupted; run it again to go on")
        return EXIT_FAILED
    if hold:
        _hold(pager.mapping, progress.locked_bytes)
    return EXIT_FAILED if short else EXIT_OK


def _report(
    plan: WarmPlan, progress: WarmProgress, verdict: Verdict, seconds: float, cancelled: bool
) -> dict[str, Any]:
    missing: list[Skip] = [*progress.skipped, *(() if cancelled else verdict.missing)]
    return {
        "target_bytes": plan.target_bytes,
        "resident_bytes": verdict.resident_bytes,
        "locked_bytes": progress.locked_bytes,
        "read_bytes": progress.read_bytes,
        "seconds": round(seconds, 3),
        "bytes_per_second": int(progress.read_bytes / seconds) if seconds else 0,
        "unknown": verdict.unknown_bytes,
        "interrupted": cancelled,
        "skipped": [s.json() for s in missing],
    }


def print_report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
        return
    resident = report["resident_bytes"]
    if resident is None:
        there = "what is resident cannot be known: the file is neither yours nor writable"
    else:
        there = f"{format_size(resident)} of {format_size(report['target_bytes'])} resident"
    locked = f", {format_size(report['locked_bytes'])} locked" if report["locked_bytes"] else ""
    rate = f"{format_size(report['bytes_per_second'])}/s"
    click.echo(
        f"{there}{locked}; read {format_size(report['read_bytes'])} in {format_seconds(report['seconds'])}, {rate}"
    )
    for skip in report["skipped"]:
        click.echo(f"  not {'locked' if 'lock' in skip['what'] else 'resident'}: "
                   f"{format_size(skip['bytes'])}, {skip['what']}: {skip['why']}")  # fmt: skip


def _hold(mapping: MappedFiles, locked_bytes: int) -> None:
    """Notices when the file is no longer the one that is held."""
    say(f"holding {format_size(locked_bytes)} locked; end it with Ctrl-C")
    wait_for_end(mapping.check)


def wait_for_end(look: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM; looks once a second."""
    ended = threading.Event()
    former = {n: signal.signal(n, lambda *_: ended.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not ended.wait(_LOOK_SECONDS):
            look()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _drop(pager: Pager, as_json: bool) -> int:
    from expertd.pages import residency

    files = pager.mapping.files
    before = [residency.resident_pages(f, 0, f.nbytes) for f in files]
    pager.drop_files()
    after = [residency.resident_pages(f, 0, f.nbytes) for f in files]
    left = _bytes(after)
    report = {"dropped_bytes": None if left is None else (_bytes(before) or 0) - left, "resident_bytes": left}
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
    elif left is None:
        click.echo("dropped; what is left cannot be known: the file is neither yours nor writable")
    else:
        why = ", which another process maps or locks" if left else ""
        click.echo(f"dropped {format_size(report['dropped_bytes'] or 0)}; {format_size(left)} left{why}")
    return EXIT_OK


def _bytes(pages: list[int | None]) -> int | None:
    from expertd.pages import libc

    known = [p for p in pages if p is not None]
    return sum(known) * libc.PAGE if len(known) == len(pages) else None


def say(text: str) -> None:
    click.echo(f"expertd: {text}", err=True)


class Shown:
    """Progress with rate and time left: a bar on a terminal, a line every two seconds elsewhere, nothing for JSON."""

    def __init__(self, progress: WarmProgress, *, quiet: bool) -> None:
        self._progress, self._quiet = progress, quiet
        self._bar: Any = None
        self._task: Any = None
        self._started = self._said = time.monotonic()
        self.update: Callable[[], None] = self._line

    def __enter__(self) -> Shown:
        if self._quiet:
            self.update = lambda: None
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = BarColumn(None), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("warm", total=self._progress.target_bytes)
            self.update = lambda: self._bar.update(
                self._task, total=self._progress.target_bytes, completed=self._progress.done_bytes
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line(self) -> None:
        now = time.monotonic()
        if now - self._said < _SAY_SECONDS:
            return
        self._said = now
        done, target = self._progress.done_bytes, self._progress.target_bytes
        rate = done / (now - self._started)
        left = f", {format_seconds((target - done) / rate)} left" if rate else ""
        say(f"{format_size(done)} of {format_size(target)}, {format_size(rate)}/s{left}")
