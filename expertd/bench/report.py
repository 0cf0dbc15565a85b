"""The page that a benchmark leaves behind: one HTML file with its plots inside, that needs nothing but a browser.

It shows what the JSON holds (`ab_document`, `http_document`) and computes nothing of its own. How it looks lies in
`templates`.
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from expertd.bench import plots
from expertd.bench.ab import Job
from expertd.bench.machine import Machine
from expertd.bench.results import Comparison, to_json
from expertd.errors import BenchError
from expertd.model.gguf import GgufModel
from expertd.units import format_seconds, format_size

Document = dict[str, Any]


def ab_document(
    job: Job,
    model: GgufModel,
    comparison: Comparison,
    machine: Machine,
    *,
    command: Sequence[str],
    notes: Sequence[str],
) -> Document:
    """The JSON of `bench ab` and `bench geometry`, plain dicts and lists all through."""
    experts = model.integer("expert_count") or 0
    measured = to_json(comparison)
    for arm in measured["arms"]:
        speed = arm["prompt_read_bytes_per_second"]
        arm["prompt_disk_share"] = speed / machine.disk_sequential if speed and machine.disk_sequential else None
    document = {
        **measured,
        "command": shlex.join(command),
        "date": _now(),
        "model": {
            "name": model.name,
            "path": str(job.model),
            "arch": model.arch,
            "nbytes": model.nbytes,
            "layers": model.integer("block_count"),
            "experts": experts,
            "experts_used": model.integer("expert_used_count") or 0,
        },
        "memory_bytes": job.memory_bytes,
        "read_ahead_kb": job.read_ahead_kb or machine.read_ahead_kb,
        "runs": job.runs,
        "tokens": job.n_tokens,
        "prompts": [{"topic": p.topic, "text": p.text, "tokens": len(p.tokens) or None} for p in job.prompts],
        "routes": str(job.routes) if job.routes else "",
        "warm": job.warm,
        "limit_seconds": job.limit_seconds,
        "machine": machine,
        "disk_bytes_per_second": machine.disk_sequential,
        "notes": list(notes),
    }
    plain: Document = msgspec.to_builtins(document)
    return plain


def http_document(summary: Mapping[str, Any], command: Sequence[str]) -> Document:
    """The JSON of `bench http`."""
    plain: Document = msgspec.to_builtins({**summary, "command": shlex.join(command), "date": _now()})
    return plain


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def own_command() -> list[str]:
    """How this process was called, without where it is installed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def check_target(path: Path) -> None:
    """Raises BenchError when no report can be written there, UsageError when plots cannot be made: before measuring."""
    plots.check_available()
    if not path.parent.is_dir():
        raise BenchError(f"cannot write {path}: there is no directory {path.parent}")


def write_ab(path: Path, document: Document) -> None:
    """The page of an `ab` document. Raises BenchError when it cannot be written."""
    arms = document["arms"]
    _write(path, "ab", document, [
        plots.bars("Decode speed", "tokens a second", _per_run(arms, "tokens_per_second")),
        plots.lines("Time of each token", "token", "seconds", _token_times(arms)),
        plots.bars("Time to the first token of a request", "seconds", _per_run(arms, "ttft_seconds")),
        plots.bars("From process start to the first token", "seconds", _per_run(arms, "start_to_first_token_seconds")),
        plots.bars("Read from disk", "MB a token", _scaled(_per_run(arms, "read_bytes_per_token"), 1e-6)),
        plots.bars("Major page faults", "a token", _per_run(arms, "major_faults_per_token")),
        plots.bars("Processor time", "seconds a token", _per_run(arms, "cpu_seconds_per_token")),
    ])  # fmt: skip


def write_http(path: Path, document: Document) -> None:
    """The page of a `bench http` document. Raises BenchError when it cannot be written."""
    good = [a for a in document["answers"] if not a["error"]]
    first = [a["ttft_seconds"] for a in good]
    gaps = [g for a in good for g in a["gaps"]]
    _write(path, "http", document, [
        plots.shares("Time to the first token", "seconds", {"requests": first}),
        plots.shares("Time between pieces", "seconds", {"pieces": gaps}),
    ])  # fmt: skip


def _per_run(arms: Sequence[Document], metric: str) -> dict[str, list[float]]:
    """Each arm's value of a metric in each run. Runs carry raw costs; the metric is asked of them again."""
    from expertd.bench.results import METRICS
    from expertd.bench.spec import Run

    found = {}
    for arm in arms:
        values = (METRICS[metric](msgspec.convert(run, Run)) for run in arm["runs"])
        found[arm["name"]] = [v for v in values if v is not None]
    return found


def _scaled(groups: Mapping[str, Sequence[float]], factor: float) -> dict[str, list[float]]:
    return {name: [v * factor for v in values] for name, values in groups.items()}


def _token_times(arms: Sequence[Document]) -> dict[str, list[float]]:
    """Every gap of the arm's last run, prompts one after the other."""
    return {a["name"]: [g for p in a["runs"][-1]["prompts"] for g in p["token_seconds"]] for a in arms}


def _write(path: Path, kind: str, document: Document, figures: Sequence[str]) -> None:
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("expertd.bench", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Callable[..., str]] = {"size": format_size, "seconds": format_seconds, "number": number}
    environment.filters.update(filters)
    # The plots are this program's own SVG; everything else on the page is escaped.
    page = environment.get_template(f"{kind}.html.j2").render(d=document, plots=[Markup(f) for f in figures])
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as e:
        raise BenchError(f"cannot write {path}: {e.strerror}") from e


def number(value: float | None) -> str:
    """Three significant digits, or a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
