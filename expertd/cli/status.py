"""`expertd status`: what a running daemon does, in a screenful or as JSON. `top` shows the same, moving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from expertd.cli.client import DaemonClient, daemon_options
from expertd.errors import EXIT_NOT_READY, EXIT_OK
from expertd.units import format_size


@click.command("status")
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(socket: Path | None, url: str | None, as_json: bool) -> int:
    """Tell state, model, cache and bottleneck of a running daemon; exits 3 while it is not ready."""
    client = DaemonClient(socket, url)
    try:
        found = client.get("/expertd/status")
    finally:
        client.close()
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    return EXIT_OK if found["state"] == "ready" else EXIT_NOT_READY


def lines(s: dict[str, Any]) -> list[str]:
    """A status as lines for a person."""
    cache, rows = s["cache"], []
    rows.append(f"state      {s['state']}" + (f": {s['failure']}" if s.get("failure") else ""))
    progress = s.get("progress") or {}
    if s["state"] in ("loading", "warming") and progress.get("total"):
        rows.append(f"progress   {progress['what']} {100 * progress['done'] // progress['total']} %")
    elif s["state"] == "warming" and progress.get("what") == "rehearsal":
        rows.append("progress   waiting for a rehearsal that meets its targets: `expertd rehearse`")
    if s.get("model"):
        rows.append(f"model      {s['model']['id']} ({s['model']['description']}, {format_size(s['model']['nbytes'])})")
    rows.append(f"steering   {cache['why']}")
    if cache["steering"]:
        experts = cache["experts"]
        rows += [
            f"budget     {format_size(cache['budget_bytes'])}, policy {cache['policy']}",
            f"resident   {experts['resident']} of {experts['total']} experts, {format_size(cache['resident_bytes'])}"
            f" ({format_size(cache['pinned_bytes'])} pinned)",
            f"hits       {cache['hits']} of {cache['requests']} ({100 * cache['hit_ratio']:.1f} %), "
            f"{cache['evictions']} evictions, {format_size(cache['bytes_read'])} fetched",
        ]
    verdict = s.get("verdict")
    if verdict:
        rows.append(f"verdict    {verdict['sentence']} {verdict['advice']}".rstrip())
    rows += [f"note       {note}" for note in s.get("notes", [])]
    return rows
