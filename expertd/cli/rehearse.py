"""`expertd rehearse`: the daemon runs a demo's prompts, learns, warms, pins and runs them again; here it is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from expertd.cli.client import DaemonClient, daemon_options
from expertd.errors import EXIT_NOT_READY, EXIT_OK, UsageError
from expertd.units import format_seconds, format_size, parse_seconds

_SECONDS = 3600.0
"""A prompt on a slow machine may be silent for long; the daemon sends keep-alives meanwhile."""


@click.command("rehearse")
@click.option("--script", type=click.Path(path_type=Path), required=True,
              help="The demo's prompts: one a line, or parted by lines of ---. Lines from # are left out.")  # fmt: skip
@click.option("--profile", default="demo", show_default=True, help="The profile to teach; it is begun afresh.")
@click.option("--add", is_flag=True, help="Add to what the profile knows instead.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--target-tps", type=click.FloatRange(0, min_open=True), help="Tokens a second for each answer.")
@click.option("--target-ttft", metavar="TIME", help="Time within which each answer must begin, such as 3s.")
@click.option("--pin", is_flag=True, help="Lock the experts, as far as the pin budget reaches.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@daemon_options
def command(
    script: Path, socket: Path | None, url: str | None, target_ttft: str | None, as_json: bool, **options: Any
) -> int:
    """Rehearse a demo on the running daemon: run its prompts, learn and warm their experts, run them again.

    Exits 3 when a target is missed, and says what would help. A daemon with ready_requires = "rehearsed" is ready
    after a rehearsal that met its targets.
    """
    seconds = parse_seconds(target_ttft) if target_ttft else None
    body = {**options, "prompts": read_script(script), "target_ttft_seconds": seconds, "stream": True}
    client = DaemonClient(socket, url, seconds=_SECONDS)
    result: dict[str, Any] = {}
    try:
        for event in client.events("/expertd/rehearse", {k: v for k, v in body.items() if v is not None}):
            if event["event"] == "result":
                result = event
            elif not as_json:
                _progress(event)
    finally:
        client.close()
    click.echo(json.dumps(result, indent=2) if as_json else "\n".join(lines(result, body["prompts"])))
    return EXIT_OK if result.get("ok") else EXIT_NOT_READY


def read_script(path: Path) -> list[str]:
    """The prompts of a script. UsageError where it cannot be read or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    kept = [line for line in text.splitlines() if not line.startswith("#")]
    if any(line.strip() == "---" for line in kept):
        blocks = "\n".join("\0" if line.strip() == "---" else line for line in kept).split("\0")
        prompts = [block.strip() for block in blocks]
    else:
        prompts = [line.strip() for line in kept]
    prompts = [p for p in prompts if p]
    if not prompts:
        raise UsageError(f"{path}: holds no prompt", hint="one a line, or parted by lines of ---")
    return prompts


def _progress(event: dict[str, Any]) -> None:
    """One line to standard error for each step, drawn over on a terminal."""
    if event["event"] == "warm":
        done, target = event["done_bytes"], event["target_bytes"]
        words = f"warming {format_size(done)} of {format_size(target)}, {format_size(event['bytes_per_second'])}/s"
    else:
        run = "first run" if event["event"] == "first" else "rehearsed"
        words = f"{run} {event['prompt'] + 1}/{event['prompts']}: {_figures(event)}"
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{words}", nl=event["event"] != "warm", err=True)
    elif event["event"] != "warm" or event["phase"] == "done":
        click.echo(f"expertd: {words}", err=True)


def _figures(f: dict[str, Any]) -> str:
    hits = f", {100 * f['hit_ratio']:.1f} % hits" if f["hit_ratio"] is not None else ""
    return f"{format_seconds(f['ttft_seconds'])} to the first token, {f['tokens_per_second']:.1f} tok/s{hits}"


def lines(result: dict[str, Any], prompts: list[str]) -> list[str]:
    """The result for a person: each prompt's figures before and after, what was missed, what would help."""
    rows = [f"{'prompt':<32} {'first token':>20}  {'tokens a second':>18}  {'hits':>16}  {'read':>20}"]
    missed = {(m["prompt"], m["what"]) for m in result["missed"]}
    for n, (text, a, b) in enumerate(zip(prompts, result["first"], result["second"], strict=True)):
        name = text.replace("\n", " ")
        name = name if len(name) <= 32 else name[:31] + "…"
        ttft = f"{format_seconds(a['ttft_seconds'])} > {format_seconds(b['ttft_seconds'])}"
        speed = f"{a['tokens_per_second']:.1f} > {b['tokens_per_second']:.1f}"
        marks = "".join(" !" for what in ("ttft_seconds", "tokens_per_second") if (n, what) in missed)
        read = f"{format_size(a['bytes_read'])} > {format_size(b['bytes_read'])}"
        rows.append(f"{name:<32} {ttft:>20}  {speed:>18}  {_hits(a, b):>16}  {read:>20}{marks}")
    rows += list(_warmed(result["warmed"]))
    if result["ok"]:
        return [*rows, "rehearsed: every target is met" if result["targets"] else "rehearsed"]
    rows.append("targets missed:")
    for m in result["missed"]:
        what = "tokens a second" if m["what"] == "tokens_per_second" else "seconds to the first token"
        rows.append(f"  prompt {m['prompt'] + 1}: {m['got']:g} {what}, {m['wanted']:g} wanted")
    return [*rows, "what would help:", *(f"  {advice}" for advice in result["advice"])]


def _hits(a: dict[str, Any], b: dict[str, Any]) -> str:
    if a["hit_ratio"] is None or b["hit_ratio"] is None:
        return "not steered"
    return f"{100 * a['hit_ratio']:.1f} > {100 * b['hit_ratio']:.1f} %"


def _warmed(warmed: dict[str, Any]) -> Iterator[str]:
    if not warmed:
        return
    there = warmed["resident_bytes"]
    resident = "unknown how much" if there is None else format_size(there)
    pinned = f", {format_size(warmed['locked_bytes'])} of experts pinned" if warmed["locked_bytes"] else ""
    yield f"warmed    {resident} of {format_size(warmed['target_bytes'])} resident{pinned}"
    for s in warmed["skipped"]:
        yield f"  left out: {s['what']}, {format_size(s['bytes'])}: {s['why']}"
