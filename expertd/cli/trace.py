"""`expertd trace`: records which experts the router picks, in a running daemon; off until it is started."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import click

from expertd.cli.client import DaemonClient, daemon_options
from expertd.errors import NotReadyError
from expertd.units import format_size, parse_size


@click.group("trace")
def command() -> None:
    """Record the router's choices of a running daemon.

    Off by default and bounded: which experts a text used tells something of the text. `expertd replay` reads the file.
    """


@command.command("start")
@click.option("--max", "most", metavar="SIZE", help="Size at which recording ends; else trace.max_bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@daemon_options
def start(most: str | None, as_json: bool, socket: Path | None, url: str | None) -> None:
    """Begin to record, into a new file."""
    body = {"max_bytes": parse_size(most)} if most else {}
    _say(DaemonClient(socket, url).post("/expertd/trace/start", body), as_json)


@command.command("stop")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@daemon_options
def stop(as_json: bool, socket: Path | None, url: str | None) -> None:
    """End recording; the file stays."""
    _say(DaemonClient(socket, url).post("/expertd/trace/stop"), as_json)


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@daemon_options
def status(as_json: bool, socket: Path | None, url: str | None) -> None:
    """Tell whether it records, and how much it has."""
    _say(DaemonClient(socket, url).get("/expertd/trace"), as_json)


def _say(s: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(s, indent=2))
        return
    state = "recording" if s["recording"] else f"not recording ({s['stopped']})"
    dropped = f", {s['dropped']} dropped" if s["dropped"] else ""
    click.echo(f"{state}: {s['routes']} routes{dropped}, {format_size(s['bytes'])} of {format_size(s['max_bytes'])}, "
               f"{s['path']}")  # fmt: skip


@command.command("export")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--csv", "as_csv", is_flag=True, help="As columns instead of the binary form.")
@daemon_options
def export(file: Path, as_csv: bool, socket: Path | None, url: str | None) -> None:
    """Write what is recorded to FILE (- is standard output)."""
    from expertd.runtime.profile_file import write_atomically
    from expertd.runtime.trace_file import csv_lines, read_header, read_routes

    found = DaemonClient(socket, url, seconds=300.0).content("/expertd/trace/file", "application/octet-stream")
    if found is None:
        raise NotReadyError("the daemon sent nothing")
    data = found[0]
    if as_csv:
        source = io.BytesIO(data)
        header = read_header(source, "the daemon's trace")
        data = ("\n".join(csv_lines(header, read_routes(source))) + "\n").encode()
    if str(file) == "-":
        sys.stdout.buffer.write(data)
        return
    write_atomically(file, data)
    click.echo(f"wrote {file}, {format_size(len(data))}")
