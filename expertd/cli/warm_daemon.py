"""`expertd warm` where a daemon serves the model: it is asked, since its budget and its pins are its own.

What a daemon that answers serves is told by the model's fingerprint, so that links and shards are the same model. The
bar and the report are `warm`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from expertd.cli.client import DaemonClient, RefusedError
from expertd.errors import EXIT_FAILED, EXIT_OK, NotReadyError, UsageError
from expertd.units import format_size, parse_size

_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What `expertd warm` was asked for. `model` None is whatever the daemon serves."""

    model: Path | None
    profile: str | None
    level: str
    budget: str
    pin: bool
    hold: bool
    drop: bool
    as_json: bool


def through_daemon(wish: Wish, socket: Path | None, url: str | None) -> int | None:
    """The exit code; None where no daemon steers this model. Raises NotReadyError or RefusedError where a daemon was
    named, and what the daemon says against the wish."""
    named = socket is not None or url is not None
    client = DaemonClient(socket, url, seconds=_SECONDS)
    try:
        if not _serves(client, wish.model, named=named):
            return None
        if wish.drop:
            return _drop(client, wish)
        return _warm(client, wish)
    finally:
        client.close()


def _serves(client: DaemonClient, model: Path | None, *, named: bool) -> bool:
    try:
        status = client.get("/expertd/status")
    except (NotReadyError, RefusedError):
        if named or model is None:
            raise
        return False
    if not status["cache"]["steering"]:
        if named or model is None:
            raise UsageError(f"the daemon has nothing to warm: {status['cache']['why']}", hint="give MODEL and --local")
        return False
    if model is None or status["model"]["fingerprint"] == _fingerprint(model):
        return True
    if named:
        raise UsageError(f"the daemon serves {status['model']['id']}, not {model}", hint="leave one of them out")
    return False


def _fingerprint(model: Path) -> str:
    from expertd.model.fingerprint import fingerprint
    from expertd.model.gguf import read_model

    return fingerprint(read_model(model))


def _warm(client: DaemonClient, wish: Wish) -> int:
    from expertd.cli.warm import Shown, print_report, say, wait_for_end
    from expertd.pages.warming import WarmProgress

    body: dict[str, Any] = {"level": wish.level, "pin": wish.pin or wish.hold, "stream": True}
    if wish.profile:
        body["profile"] = wish.profile
    if wish.budget != "auto":
        body["budget"] = parse_size(wish.budget)
    progress, report = WarmProgress(0), {}
    with Shown(progress, quiet=wish.as_json) as shown:
        try:
            for report in client.events("/expertd/warm", body):
                progress.target_bytes, progress.done_bytes = report["target_bytes"], report["done_bytes"]
                shown.update()
        except KeyboardInterrupt:
            report["interrupted"] = True
    if not report:
        raise RefusedError("the daemon ended the warm-up without a word", hint="see its log")
    print_report(report, wish.as_json)
    if report["interrupted"]:
        say("interrupted; run it again to go on")
        return EXIT_FAILED
    if wish.hold:
        say(f"the daemon holds {format_size(report['locked_bytes'])} of experts locked; end it with Ctrl-C")
        wait_for_end(lambda: None)
        client.post("/expertd/unpin", {"profile": wish.profile} if wish.profile else {})
    short = report["resident_bytes"] is not None and report["resident_bytes"] < 0.99 * report["target_bytes"]
    return EXIT_FAILED if short or "error" in report else EXIT_OK


def _drop(client: DaemonClient, wish: Wish) -> int:
    import json

    answer = client.post("/expertd/evict", {"all": True})
    if wish.as_json:
        click.echo(json.dumps({"dropped_bytes": answer["evicted"]["bytes"], **answer}, indent=2))
    else:
        click.echo(f"the daemon dropped {answer['evicted']['experts']} experts, "
                   f"{format_size(answer['evicted']['bytes'])}; its dense weights stay")  # fmt: skip
    return EXIT_OK
