"""`expertd profile`: list, show, move, merge and compare saved hot maps, in a running daemon or in the files.

What profiles are lies in `runtime.profile`; where they are looked for, in `cli.profile_store`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expertd.cli.profile_store import Store, Where, open_store, place_options
from expertd.errors import StateError, UsageError
from expertd.units import parse_size

if TYPE_CHECKING:
    from expertd.runtime.profile import Profile


@click.group("profile")
def command() -> None:
    """List, show, move, merge and compare saved hot maps.

    A profile is what one use of a model needs: how often each expert was chosen. A running daemon is asked where one
    answers; else the files of its state directory are read.
    """


@command.command("list")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool, **where: Any) -> None:
    """All profiles: tokens that taught them, and how concentrated they are."""
    store = open_store(Where(**where))
    rows = store.rows()
    if as_json:
        click.echo(json.dumps({"where": store.where, "profiles": rows}, indent=2))
        return
    if not rows:
        click.echo(f"no profiles in {store.where}")
        return
    click.echo(f"{'name':<20} {'tokens':>9}  {'experts':>7}  hottest 25 %  {'changed':<16}  model")
    for row in rows:
        click.echo(_row(row))


def _row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:<20} cannot be used: {row['error']}"
    marks = ("*" if row.get("default") else "") + ("" if row.get("saved", True) else " (not saved)")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["updated"]))
    share = f"{100 * row['share']['top25']:.0f} %"
    name = row["name"] + marks
    return f"{name:<20} {row['tokens']:>9}  {row['experts']:>7}  {share:>12}  {when:<16}  {row['model']}"


@command.command("show")
@click.argument("name", default="default")
@place_options
@click.option("--plot", type=click.Path(path_type=Path), help="Write the map as .png or .svg instead.")
@click.option("--sort", "by_heat", is_flag=True, help="Sort each layer's experts by heat.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the counts.")
def show(name: str, plot: Path | None, by_heat: bool, as_json: bool, **where: Any) -> None:
    """Draw the heat map of NAME, layers x experts, and how concentrated it is."""
    from expertd.cli import heat
    from expertd.runtime.profile_file import document
    from expertd.runtime.profiles import summary

    profile = open_store(Where(**where)).get(name)
    if as_json:
        click.echo(json.dumps({**document(profile), "share": summary(profile)["share"]}))
        return
    shape = profile.shape
    title = f"{shape.model}, profile {profile.name}: {profile.tokens} tokens"
    drawn = heat.heat_map(title, profile.chances(), shape.n_experts, shape.n_used, by_heat=by_heat)
    if plot is not None:
        heat.plot(drawn, plot)
        click.echo(f"wrote {plot}")
        return
    click.echo("\n".join(_facts(profile)))
    width = shutil.get_terminal_size((100, 40)).columns
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(heat.as_colours(drawn, width))
    else:
        click.echo("\n".join(heat.as_characters(drawn, width)))


def _facts(profile: Profile) -> list[str]:
    from expertd.runtime.profiles import summary

    s = summary(profile)
    share = s["share"]
    when = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t)) for t in (profile.created, profile.updated)]
    rows = [
        f"profile   {profile.name} of {profile.shape.model} ({profile.shape.fingerprint})",
        f"learnt    {profile.tokens} tokens, {s['experts']} of {len(profile.counts)} experts used; begun {when[0]}, "
        f"changed {when[1]}, expertd {profile.version}",
        f"requests  {100 * share['top10']:.0f} % to the hottest 10 % of experts, {100 * share['top25']:.0f} % to 25 %, "
        f"{100 * share['top50']:.0f} % to 50 %",
    ]
    if profile.sources:
        rows.append(f"from      {', '.join(profile.sources)}")
    return [*rows, ""]


@command.command("export")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@place_options
def export(name: str, file: Path, **where: Any) -> None:
    """Write NAME to FILE (- is standard output), to be imported elsewhere."""
    from expertd.runtime.profile_file import encode, write_atomically

    data = encode(open_store(Where(**where)).get(name))
    if str(file) == "-":
        sys.stdout.buffer.write(data)
        return
    write_atomically(file, data)
    click.echo(f"wrote {file}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", help="Its name here; else the one it has, or the file's.")
@click.option("--replace", is_flag=True, help="Replace a profile of that name.")
@place_options
def import_(file: Path, name: str | None, replace: bool, **where: Any) -> None:
    """Take a profile from FILE: an exported one, or an importance matrix of llama.cpp (GGUF or imatrix.dat)."""
    store = open_store(Where(**where))
    profile, note = _read(file, name, store)
    if not replace and store.has(profile.name):
        raise StateError(f"there is a profile {profile.name!r} in {store.where}", hint="--replace it, or give --name")
    warning = store.put(profile)
    click.echo(f"imported {profile.name} into {store.where}{note}")
    if warning:
        click.echo(f"expertd: {warning}", err=True)


def _read(file: Path, name: str | None, store: Store) -> tuple[Profile, str]:
    from expertd.runtime import imatrix
    from expertd.runtime.profile import check_name, is_name
    from expertd.runtime.profile_file import FORMAT, decode

    try:
        with file.open("rb") as f:
            head = f.read(200)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    if FORMAT.encode() in head or not imatrix.is_imatrix(file):
        try:
            return decode(file.read_bytes(), name or ""), ""
        except StateError as error:
            raise StateError(f"{file}: {error.message}", hint=error.hint) from error
    chosen = name or file.stem
    if name is None and not is_name(chosen):
        raise UsageError(f"{chosen!r} cannot be a profile's name", hint="give --name")
    shape = store.shape()
    seed = imatrix.read(file, shape.n_experts)
    note = "" if seed.exact else "; this form keeps no counts, so that the order is rough"
    return imatrix.seed_profile(check_name(chosen), shape, seed, str(file)), note


@command.command("merge")
@click.argument("names", nargs=-1, required=True)
@click.option("--into", required=True, help="Name of the sum; may be one of them.")
@place_options
def merge(names: tuple[str, ...], into: str, **where: Any) -> None:
    """Add NAMES up under another name; they stay."""
    from expertd.runtime import profile as hot

    store = open_store(Where(**where))
    merged = hot.merge(hot.check_name(into), [store.get(n) for n in names])
    warning = store.put(merged)
    click.echo(f"{into}: {merged.tokens} tokens of {', '.join(names)}")
    if warning:
        click.echo(f"expertd: {warning}", err=True)


@command.command("diff")
@click.argument("first")
@click.argument("second")
@click.option("--budget", help="Bytes of experts, to tell what each would hit with the other's; needs --model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@place_options
def diff(first: str, second: str, budget: str | None, as_json: bool, **where: Any) -> None:
    """Compare two profiles: how far their hot experts are the same, and what one's warm set gives the other."""
    from expertd.runtime import profile as hot

    store = open_store(Where(**where))
    a, b = store.get(first), store.get(second)
    if a.shape.fingerprint != b.shape.fingerprint:
        raise UsageError(f"{first} and {second} are profiles of different models")
    sizes, total = _sizes(a, where["model"])
    rows = []
    for share in (0.10, 0.25, 0.50):
        room = round(share * total)
        rows.append({"share": share, "same": hot.overlap(a, b, share), **_held(a, b, sizes, room)})
    if budget:
        room = parse_size(budget)
        rows.append({"share": room / total, "same": hot.overlap(a, b, min(1.0, room / total)),
                     **_held(a, b, sizes, room)})  # fmt: skip
    if as_json:
        click.echo(json.dumps({"first": first, "second": second, "rows": rows}, indent=2))
        return
    click.echo(f"requests of {first} and of {second} that hit, with the hottest experts of either held")
    click.echo(f"{'held':>7}  {'same':>5}  {first + ' of its own':>24}  {'of ' + second:>20}  "
               f"{second + ' of its own':>24}  {'of ' + first:>20}")  # fmt: skip
    for r in rows:
        cells = [f"{100 * r[key]:.0f} %" for key in ("first_own", "first_other", "second_own", "second_other")]
        click.echo(f"{100 * r['share']:>5.1f} %  {100 * r['same']:>3.0f} %  {cells[0]:>24}  {cells[1]:>20}  "
                   f"{cells[2]:>24}  {cells[3]:>20}")  # fmt: skip


def _sizes(profile: Profile, model: Path | None) -> tuple[list[int], int]:
    """Bytes by expert id where the model is at hand, else every expert counts one."""
    if model is None:
        return [1] * len(profile.counts), len(profile.counts)
    from expertd.model.expertmap import build_map
    from expertd.model.gguf import read_model

    layout = build_map(read_model(model)).layout()
    return layout.expert_sizes, layout.expert_nbytes


def _held(a: Profile, b: Profile, sizes: list[int], room: int) -> dict[str, float]:
    from expertd.runtime.profile import held_share

    hot_a, hot_b = a.hottest(), b.hottest()
    return {
        "first_own": held_share(a, hot_a, sizes, room), "first_other": held_share(a, hot_b, sizes, room),
        "second_own": held_share(b, hot_b, sizes, room), "second_other": held_share(b, hot_a, sizes, room),
    }  # fmt: skip


@command.command("rename")
@click.argument("name")
@click.argument("to")
@place_options
def rename(name: str, to: str, **where: Any) -> None:
    """Give NAME the name TO."""
    open_store(Where(**where)).rename(name, to)
    click.echo(f"{name} is {to} now")


@command.command("delete")
@click.argument("names", nargs=-1, required=True)
@place_options
def delete(names: tuple[str, ...], **where: Any) -> None:
    """Delete NAMES for good."""
    store = open_store(Where(**where))
    for name in names:
        store.delete(name)
        click.echo(f"deleted {name}")
