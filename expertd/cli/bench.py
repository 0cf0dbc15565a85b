"""`expertd bench`: servers over HTTP, steered against plain, models by their geometry alone.

What is measured and how lies in `expertd.bench`; here the command line becomes a job, and a result a table, JSON or a
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from expertd.bench.ab import Job
    from expertd.bench.geometry import Geometry
    from expertd.bench.progress import Screen
    from expertd.bench.spec import Prompt

_F = TypeVar("_F", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path)
_TABLE = (
    ("decode, tokens/s", "tokens_per_second", 1.0),
    ("first token, s", "ttft_seconds", 1.0),
    ("start to first token, s", "start_to_first_token_seconds", 1.0),
    ("load, s", "load_seconds", 1.0),
    ("prompt, tokens/s", "prompt_tokens_per_second", 1.0),
    ("read a token, MB", "read_bytes_per_token", 1e-6),
    ("major faults a token", "major_faults_per_token", 1.0),
    ("processor a token, ms", "cpu_seconds_per_token", 1e3),
    ("expert hits, %", "hit_ratio", 100.0),
    ("tap a token, ms", "tap_seconds_per_token", 1e3),
)


@click.group("bench")
def command() -> None:
    """Measure: a server, steered against plain, or a model's geometry before its download."""


def _options(*decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    def apply(f: _F) -> _F:
        for decorator in reversed(decorators):
            f = decorator(f)
        return f

    return apply


_RESULT = _options(
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--report", type=_PATH, help="Write a page with plots (needs expertd[plots])."),
)
_COMPARE = _options(
    click.option("--memory", default="none", show_default=True, metavar="SIZE",
                 help="Bound memory and page cache, in a cgroup (root); none: what there is."),
    click.option("--arm", "arms", multiple=True, metavar="ARM",
                 help="plain, repacked, steered, auto, steered@2GiB, steered/lru ... (default: plain and steered)."),
    click.option("--runs", default=3, show_default=True, help="Runs of each arm, alternating."),
    click.option("--tokens", default=100, show_default=True, help="Tokens of each answer."),
    click.option("--prompt-tokens", default=0, help="Cut prompts to this many tokens."),
    click.option("--limit", default="10m", show_default=True, metavar="TIME",
                 help="End a run after this time; it then counts with its upper bound."),
    click.option("--ctx", default=0, help="Context size (default: what the prompts need)."),
    click.option("--ubatch", default=0, help="Tokens of a prompt computed together (default: the arm's own)."),
    click.option("--threads", default=0, help="Threads (default: physical cores)."),
    click.option("--warm", is_flag=True, help="Start each run with the model in the page cache, instead of without."),
    click.option("--read-ahead", type=int, metavar="KIB", help="Set the disk's read_ahead_kb meanwhile (root)."),
    click.option("--dir", "directory", type=_PATH, help="Where model files are made (/var/tmp/expertd-bench)."),
    click.option("--keep", is_flag=True, help="Keep a model file that was made, for the next time."),
    _RESULT,
)  # fmt: skip


@command.command("ab")
@click.argument("model", type=_PATH, required=False)
@click.option("--inflate", metavar="SIZE", help="Instead of MODEL: the built-in one, its experts padded to this size.")
@click.option("--prompt", help="Ask this instead of the built-in prompts.")
@click.option("--prompts", type=_PATH, help='Ask these: lines of {"topic": ..., "text": ...}.')
@click.option("--topic", "topics", multiple=True, help="Of --prompts, those of this topic (again for more).")
@click.option("--per-topic", default=1, show_default=True, help="Of --prompts, so many of each topic.")
@_COMPARE
def ab(model: Path | None, inflate: str | None, prompt: str | None, prompts: Path | None, topics: tuple[str, ...],
       per_topic: int, **options: Any) -> None:  # fmt: skip
    """Compare plain llama.cpp with expertd on MODEL: same prompts, own processes, cold cache, bounded memory."""
    from expertd.bench import inflate as inflation
    from expertd.bench.progress import screen
    from expertd.bench.prompts import BUILT_IN, from_file
    from expertd.bench.spec import Prompt
    from expertd.errors import UsageError
    from expertd.units import parse_size

    if (model is None) == (inflate is None):
        raise UsageError("give a MODEL or --inflate SIZE, one of the two")
    if prompt and prompts:
        raise UsageError("give --prompt or --prompts, one of the two")
    asked = from_file(prompts, topics, per_topic) if prompts else (Prompt("", prompt),) if prompt else BUILT_IN
    shown = screen()
    if model is not None:
        _compare(model, asked, options, shown)
        return
    plan = inflation.plan(parse_size(inflate or ""))
    with _made(plan.file_name(), plan.nbytes, partial(inflation.write, plan), options, shown) as path:
        _compare(path, asked, options, shown)


@command.command("geometry")
@click.argument("name", required=False)
@click.option("--routes", type=_PATH, help="Force this recorded trace upon the model in every arm.")
@click.option("--list", "list_all", is_flag=True, help="List the known geometries with their sizes, and stop.")
@click.option("--dry-run", is_flag=True, help="Tell what would be written, and stop.")
@click.option("--layers", type=int, help="So many layers instead.")
@click.option("--experts", type=int, help="So many experts a layer instead.")
@click.option("--used", "experts_used", type=int, help="So many experts a token (default with --routes: the trace's).")
@click.option("--ff", "expert_ff", type=int, help="Experts of this width instead.")
@click.option("--vocab", type=int, help="A vocabulary of this size instead.")
@click.option("--quant", "expert_type", help="Type of the experts: Q4_0, Q4_K, Q8_0, MXFP4 ...")
@click.option("--seed", default=0, help="Of the weights and the prompt.")
@_COMPARE
def geometry(name: str | None, routes: Path | None, list_all: bool, dry_run: bool, seed: int, layers: int | None,
             experts: int | None, experts_used: int | None, expert_ff: int | None, vocab: int | None,
             expert_type: str | None, **options: Any) -> None:  # fmt: skip
    """Write a model of random weights with the geometry NAME (or a .json or .toml FILE) and compare on it."""
    from expertd.bench import synth
    from expertd.bench.presets import PRESETS
    from expertd.bench.progress import screen
    from expertd.bench.prompts import random_tokens
    from expertd.bench.routes import load
    from expertd.errors import UsageError

    if list_all:
        for known in PRESETS.values():
            click.echo(_size_line(known))
        return
    if name is None:
        raise UsageError("give the NAME of a geometry or a FILE", hint="--list names those that are known")
    trace = load(routes) if routes else None
    wanted = _geometry(name).changed(
        layers=layers, experts=experts, experts_used=experts_used or (trace.k if trace else None),
        expert_ff=expert_ff, vocab=vocab, expert_type=expert_type.upper() if expert_type else None,
    )  # fmt: skip
    if trace is not None:
        trace.check_fits(layers=len(wanted.moe_layers), experts=wanted.experts, k=wanted.experts_used)
    shown = screen()
    shown.say(_size_line(wanted))
    if dry_run:
        return
    length = options["prompt_tokens"] or (trace.prompt_tokens if trace else 0) or 32
    asked = (random_tokens(length, wanted.vocab, seed),)
    notes = _geometry_notes(wanted, trace is not None, trace.n_layers if trace else 0)
    write = partial(synth.write, wanted, seed=seed)
    with _made(synth.file_name(wanted), synth.expected_nbytes(wanted), write, options, shown) as path:
        _compare(path, asked, {**options, "routes": routes}, shown, notes)


@command.command("http")
@click.argument("url")
@click.option("--requests", default=8, show_default=True, help="How many requests.")
@click.option("--concurrency", default=1, show_default=True, help="How many at a time.")
@click.option("--tokens", default=64, show_default=True, help="Tokens of each answer.")
@click.option("--api", type=click.Choice(["chat", "completion"]), default="chat", show_default=True)
@click.option("--model", default="", help="Ask for this model (default: the server's first).")
@click.option("--prompt", help="Ask this instead of the built-in prompts.")
@click.option("--prompts", type=_PATH, help='Ask these: lines of {"topic": ..., "text": ...}.')
@click.option("--per-topic", default=1, show_default=True, help="Of --prompts, so many of each topic.")
@click.option("--same", is_flag=True, help="Send prompts as they are; a prompt cache may then answer.")
@click.option("--timeout", default="10m", show_default=True, metavar="TIME", help="For each step of a request.")
@click.option("--api-key", envvar="EXPERTD_API_KEY", help="Bearer key; better in EXPERTD_API_KEY.")
@_RESULT
def http(url: str, prompt: str | None, prompts: Path | None, per_topic: int, tokens: int, timeout: str,
         api_key: str | None, as_json: bool, report: Path | None, **options: Any) -> None:  # fmt: skip
    """Measure the server at URL, any that speaks OpenAI's API: first token, prompt and decode speed."""
    import asyncio

    from expertd.bench import http as load_test
    from expertd.bench import report as pages
    from expertd.bench.progress import screen
    from expertd.bench.prompts import BUILT_IN, from_file
    from expertd.units import parse_seconds

    if report:
        pages.check_target(report)
    asked = [prompt] if prompt else [p.text for p in (from_file(prompts, (), per_topic) if prompts else BUILT_IN)]
    load = load_test.Load(
        url, tuple(asked), n_tokens=tokens, timeout_seconds=parse_seconds(timeout), api_key=api_key or "", **options
    )
    ended = 0

    def done(answer: load_test.Answer) -> None:
        nonlocal ended
        ended += 1
        update(ended)

    with screen().bar(f"{load.requests} requests to {url}", load.requests) as update:
        model, answers = asyncio.run(load_test.run(load, done))
    document = pages.http_document(load_test.summarise(load, model, answers), pages.own_command())
    if report:
        pages.write_http(report, document)
    _print_http(document, as_json)


def _geometry(name: str) -> Geometry:
    from expertd.bench.geometry import from_file
    from expertd.bench.presets import preset

    path = Path(name)
    return from_file(path) if path.suffix.lower() in (".json", ".toml") else preset(name)


def _size_line(g: Geometry) -> str:
    from expertd.bench.tensors import sizes

    s = sizes(g)
    return (
        f"{g.name:<22} {s.total_nbytes / 1e9:7.1f} GB, {g.layers} layers x {g.experts} experts of "
        f"{s.one_expert_nbytes / 1e6:.2f} MB, {g.experts_used} used: {s.token_expert_nbytes / 1e6:.0f} MB a token"
    )


def _geometry_notes(g: Geometry, forced: bool, trace_layers: int) -> list[str]:
    if not forced:
        return ["Routing is that of random weights: nearly even. A trained model returns to its experts more often."]
    if g.layers < trace_layers:
        return [f"The trace has {trace_layers} layers, the model {g.layers}: the rest of the trace was left out."]
    return []


@contextmanager
def _made(name: str, nbytes: int, write: Callable[..., bool], options: dict[str, Any], shown: Screen) -> Iterator[Path]:
    """A model file, made unless it is there; removed at the end unless it is to be kept."""
    from expertd.bench.progress import writing
    from expertd.bench.space import DEFAULT_DIR, check_room, directory

    _check_options(options)
    path = directory(options["directory"] or DEFAULT_DIR) / name
    if not path.exists():
        check_room(path.parent, nbytes)
    with _ended_in_order():
        with writing(shown, str(path), nbytes) as progress:
            write(path, progress=progress)
        try:
            yield path
        finally:
            if not options["keep"]:
                path.unlink(missing_ok=True)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM unwinds like any error: children end, made files go, a changed read-ahead is put back."""
    import signal
    import sys

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_options(options: dict[str, Any]) -> None:
    """What can be known to be wrong before a large file is written."""
    from expertd.bench.report import check_target
    from expertd.bench.spec import Arm

    for text in options["arms"]:
        Arm.parse(text)
    _memory(options["memory"])
    if options["report"]:
        check_target(options["report"])


def _memory(text: str) -> int | None:
    from expertd.units import parse_size

    return None if text == "none" else parse_size(text)


def _job(model: Path, asked: tuple[Prompt, ...], options: dict[str, Any]) -> Job:
    from expertd.bench.ab import Job
    from expertd.bench.spec import Arm
    from expertd.units import parse_seconds

    return Job(
        model=model,
        arms=tuple(Arm.parse(text) for text in options["arms"] or ("plain", "steered")),
        prompts=asked,
        n_tokens=options["tokens"],
        prompt_tokens=options["prompt_tokens"],
        runs=options["runs"],
        memory_bytes=_memory(options["memory"]),
        limit_seconds=parse_seconds(options["limit"]),
        n_ctx=options["ctx"],
        n_ubatch=options["ubatch"],
        threads=options["threads"],
        routes=options.get("routes"),
        read_ahead_kb=options["read_ahead"],
        warm=options["warm"],
    )


def _compare(
    model: Path, asked: tuple[Prompt, ...], options: dict[str, Any], shown: Screen, notes: list[str] | None = None
) -> None:
    from expertd.bench import ab as comparing
    from expertd.bench import machine, report
    from expertd.bench.progress import RunWatch
    from expertd.errors import EXIT_FAILED
    from expertd.model.gguf import read_model

    _check_options(options)
    job = _job(model, asked, options)
    comparing.check(job)
    header = read_model(model)
    here = machine.describe(model)
    watch = RunWatch(shown, job.runs * len(job.arms), job.n_tokens * len(job.prompts))
    with _ended_in_order():
        try:
            comparison = comparing.run(job, watch)
        finally:
            watch.close()
    document = report.ab_document(job, header, comparison, here, command=report.own_command(), notes=notes or [])
    if options["report"]:
        report.write_ab(options["report"], document)
    _print_ab(document, options["as_json"])
    if not comparison.same_output:
        raise click.exceptions.Exit(EXIT_FAILED)


def _print_ab(document: dict[str, Any], as_json: bool) -> None:
    import json

    from expertd.bench.report import number

    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    arms = document["arms"]
    width = max(12, *(len(a["name"]) for a in arms))
    click.echo(" " * 26 + "".join(f"{a['name']:>{width + 2}}" for a in arms))
    for label, key, scale in _TABLE:
        values = [a[key] * scale if a[key] is not None else None for a in arms]
        if any(v is not None for v in values):
            cells = [
                ("<=" if a["bound"] and key == "tokens_per_second" else "") + number(v)
                for a, v in zip(arms, values, strict=True)
            ]
            click.echo(f"{label:<26}" + "".join(f"{c:>{width + 2}}" for c in cells))
    for arm in arms[1:]:
        ratio, what = arm["ratios"]["decode_ratio"], arm["decode_ratio_is"]
        if ratio is not None:
            bound = "" if what == "exact" else f"{what} "
            click.echo(f"{arm['name']} decodes {bound}{ratio:.2f} times as fast as {arms[0]['name']}")
        elif what == "unknown":
            click.echo(f"{arm['name']} and {arms[0]['name']} did not finish in their time: no ratio")
    bits = ", to the last bit of the logits" if document["same_logits"] else ""
    same = f"the same in all arms{bits}" if document["same_output"] else f"DIFFERENT: {document['difference']}"
    click.echo(f"output: {same}")
    for note in document["notes"]:
        click.echo(note)


def _print_http(document: dict[str, Any], as_json: bool) -> None:
    import json

    from expertd.bench.report import number

    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    first = document["ttft_seconds"]
    click.echo(f"model                    {document['model']}")
    click.echo(f"completed, failed        {document['completed']}, {document['failed']}")
    click.echo(f"first token, s           {number(first['p50'])} (90 %: {number(first['p90'])})")
    click.echo(f"prompt, tokens/s         {number(document['prompt_tokens_per_second'])}")
    click.echo(f"decode, tokens/s         {number(document['decode_tokens_per_second'])}")
    click.echo(f"all together, tokens/s   {number(document['total_tokens_per_second'])}")
    for message, count in document["errors"].items():
        click.echo(f"{count} failed: {message}")
