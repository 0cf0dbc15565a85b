"""`expertd inspect`: what a GGUF holds, as tables for a person or JSON. The figures are `model.report`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@click.command("inspect")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--tensors", is_flag=True, help="List every tensor with its role and place.")
@click.option("--layers", is_flag=True, help="List every layer with its experts and where they lie.")
def command(model: Path, as_json: bool, tensors: bool, layers: bool) -> None:
    """Tell what MODEL holds: experts, dense weights, sizes, identity. Any shard of a split model will do.

    Reads the header and a few samples of the weights; needs neither llama.cpp nor memory for the model.
    """
    from expertd.model.expertmap import build_map
    from expertd.model.fingerprint import fingerprint
    from expertd.model.gguf import read_model
    from expertd.model.report import inspect_report, layer_rows, tensor_rows

    experts = build_map(read_model(model))
    report = inspect_report(experts, fingerprint(experts.model))
    rows = layer_rows(experts) if layers else []
    listed = tensor_rows(experts) if tensors else []
    if as_json:
        if layers:
            report["layer_list"] = rows
        if tensors:
            report["tensor_list"] = listed
        click.echo(json.dumps(report, indent=2))
        return
    _show(report, rows, listed)


def _show(report: dict[str, Any], layers: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    console.print(_summary(report))
    if layers:
        console.print(_layer_table(layers))
    if tensors:
        console.print(_tensor_table(tensors))
    for warning in report["warnings"]:
        console.print(printable(f"! {warning}", "yellow"))


def printable(text: str, style: str = "") -> Text:
    """Text of a file for a terminal: nothing in it is markup or moves the cursor."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text), style=style)


def _summary(r: dict[str, Any]) -> Table:
    from rich.table import Table

    from expertd.units import format_size

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    total = max(1, r["tensor_bytes"])

    def row(name: str, value: str, note: str = "") -> None:
        table.add_row(printable(name, "bold"), printable(value), printable(note, "dim"))

    def size(name: str, nbytes: int, note: str = "") -> None:
        row(name, format_size(nbytes), f"{100 * nbytes / total:.1f} %" + (f", {note}" if note else ""))

    row("model", r["name"], r["arch"])
    row("file", r["files"][0], f"and {len(r['files']) - 1} more shards" if len(r["files"]) > 1 else "")
    row("fingerprint", r["fingerprint"])
    parameters = r["parameters"]
    row("parameters", f"{_count(parameters['total'])}, {_count(parameters['active'])} active", "footprint and speed")
    row("size", format_size(r["file_bytes"]), f"{r['file_bytes']} bytes, {r['tensors']} tensors")
    row("layers", f"{r['layers']}, {r['moe_layers']} with experts", f"trained for {r['context_length']} tokens")
    if r["moe_layers"]:
        sizes = r["expert_size_bytes"]
        row("experts", f"{r['experts']} a layer, {r['experts_used']} used", "")
        each = format_size(sizes["max"])
        row("one expert", each if sizes["min"] == sizes["max"] else f"{format_size(sizes['min'])} to {each}")
        size("expert bytes", r["expert_bytes"])
    parts = ", ".join(f"{name} {format_size(n)}" for name, n in r["dense_parts"].items() if n and name != "dense")
    size("dense bytes", r["dense_bytes"], parts)
    for name, nbytes in r["other_bytes"].items():
        if nbytes:
            size(name, nbytes)
    read = format_size(r["bytes_per_token"])
    row("read a token", read, f"{format_size(r['expert_bytes_per_token'])} of it experts")
    row("types", ", ".join(f"{name} {format_size(n)}" for name, n in r["quant"].items()))
    return table


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from expertd.units import format_size

    table = Table("layer", "dense", "experts", "used", "one", "all", "file: offset + index x stride", box=SIMPLE)
    for m in layers:
        places = [f"{t['role']} {t['file']}: {t['offset']} + i x {t['stride']}" for t in m["tensors"][:4]]
        more = f", {len(m['tensors']) - 4} more" if len(m["tensors"]) > 4 else ""
        table.add_row(
            str(m["layer"]), format_size(m["dense_bytes"]), str(m["experts"] or "-"), str(m["experts_used"] or "-"),
            format_size(m["expert_size_bytes"]), format_size(m["expert_bytes"]), printable(", ".join(places) + more),
        )  # fmt: skip
    return table


def _tensor_table(tensors: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("tensor", "role", "type", "shape", "file", "offset", "bytes", box=SIMPLE)
    for t in tensors:
        shape = " x ".join(str(d) for d in t["shape"])
        size = f"{t['bytes']}{' (by gap)' if t['by_gap'] else ''}"
        table.add_row(printable(t["name"]), t["role"], t["type"], shape, str(t["file"]), str(t["offset"]), size)
    return table


def _count(n: int) -> str:
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return str(n)
