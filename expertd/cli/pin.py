"""`expertd pin`, and what `unpin` and `evict` share with it: the choice of experts, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from expertd.cli.client import DaemonClient, daemon_options
from expertd.units import format_size

_F = TypeVar("_F", bound=Callable[..., Any])
_SECONDS = 900.0


def choice_options(function: _F) -> _F:
    """--profile, --layers, --share, --expert, --all, --json and where the daemon is."""
    options = (
        click.option("--profile", help="Experts of this profile, its hottest first."),
        click.option("--layers", metavar="0-3,7", help="Experts of these layers."),
        click.option("--share", metavar="25%", help="The hottest share of them."),
        click.option("--expert", "experts", multiple=True, metavar="LAYER:INDEX",
                     help="One expert, 3:17, or a few, 3:0-15; repeatable."),
        click.option("--all", "everything", is_flag=True, help="All of them."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return daemon_options(function)


def act(verb: str, socket: Path | None, url: str | None, as_json: bool, **choice: Any) -> dict[str, Any]:
    """Asks the daemon and prints its answer. RefusedError, NotReadyError."""
    body = {
        "profile": choice["profile"], "layers": choice["layers"], "share": choice["share"],
        "experts": list(choice["experts"]) or None, "all": choice["everything"] or None,
    }  # fmt: skip
    client = DaemonClient(socket, url, seconds=_SECONDS)
    try:
        answer: dict[str, Any] = client.post(f"/expertd/{verb}", {k: v for k, v in body.items() if v is not None})
    finally:
        client.close()
    click.echo(json.dumps(answer, indent=2) if as_json else "\n".join(lines(answer)))
    return answer


def lines(answer: dict[str, Any]) -> list[str]:
    """What came of it, for a person."""
    rows = []
    for done in ("pinned", "unpinned", "evicted"):
        if done in answer:
            rows.append(f"{done} {answer[done]['experts']} experts, {format_size(answer[done]['bytes'])}")
    rows += [f"  left out: {s['what']}, {format_size(s['bytes'])}: {s['why']}" for s in answer.get("skipped", ())]
    total = answer["pinned_total"]
    locked = f"; {format_size(answer['locked_bytes'])} locked in all" if "locked_bytes" in answer else ""
    rows.append(f"pinned now: {total['experts']} experts, {format_size(total['bytes'])} of "
                f"{format_size(answer['pin_limit_bytes'])} that may be{locked}")  # fmt: skip
    return rows


@click.command("pin")
@choice_options
def command(**options: Any) -> int:
    """Lock experts of a running daemon in memory, the hottest first, as far as the pin budget reaches.

    Exits 1 when nothing could be pinned.
    """
    answer = act("pin", **options)
    return 0 if answer["pinned"]["experts"] or not answer["skipped"] else 1
