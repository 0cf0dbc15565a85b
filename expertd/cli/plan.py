"""`expertd plan`: whether and how a model will run, with ready command lines.

Reads the machine; `model.plan` computes.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from expertd.model.expertmap import ExpertMap
    from expertd.model.plan import Machine, Plan

_VERDICTS = {
    "fits": ("green", "all experts fit in RAM"),
    "good": ("green", "close to full speed"),
    "usable": ("yellow", "the speed varies with the topic"),
    "poor": ("red", "take a smaller quantisation or a smaller model"),
}


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- LLAMA_SERVER_FLAGS]")
@click.option("--ram", metavar="SIZE", help="RAM that is free for the model; what is free here by default.")
@click.option("--vram", metavar="SIZE", help="Free GPU memory; what nvidia-smi says by default, 0 for no GPU.")
@click.option(
    "--ctx", type=click.IntRange(min=1), help="Tokens of context; 4096 by default, or what it was trained for."
)
@click.option("--kv", metavar="TYPE", help="Type of the KV cache: f16, q8_0, q4_0; chosen by default.")
@click.option("--ubatch", type=click.IntRange(min=1), help="Prompt tokens computed at once; chosen by default.")
@click.option("--bandwidth", metavar="SIZE", help="Memory bandwidth a second, such as 60GB; assumed by default.")
@click.option("--probe", is_flag=True, help="Measure the disk that holds the file; reads up to 384 MiB past the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: Path,
    flags: tuple[str, ...],
    ram: str | None,
    vram: str | None,
    ctx: int | None,
    kv: str | None,
    ubatch: int | None,
    bandwidth: str | None,
    probe: bool,
    as_json: bool,
) -> None:
    """Tell whether and how MODEL will run here, with command lines for expertd and llama-server.

    Flags of llama-server behind -- are checked for contradictions.
    """
    from expertd.model.expertmap import build_map
    from expertd.model.flags import contradictions
    from expertd.model.gguf import read_model
    from expertd.model.plan import Wish, default_context, make_plan

    experts = build_map(read_model(model))
    machine, found = read_machine(experts, ram=ram, vram=vram, bandwidth=bandwidth, probe=probe)
    plan = make_plan(experts, machine, Wish(n_ctx=ctx or default_context(experts), kv_type=kv, n_ubatch=ubatch))
    report = plan_report(plan) | {"machine": found}
    report["warnings"] += [f"your flags: {line}" for line in contradictions(plan, flags)]
    click.echo(json.dumps(report, indent=2)) if as_json else _show(report)


def read_machine(
    experts: ExpertMap, *, ram: str | None, vram: str | None, bandwidth: str | None, probe: bool
) -> tuple[Machine, dict[str, Any]]:
    """The machine for the plan, and what was found of it for the report. Raises UsageError, PagesError."""
    from expertd.engine.settings import physical_cores
    from expertd.model.forecast import Rates
    from expertd.model.gpu import read_gpus
    from expertd.model.plan import Machine
    from expertd.pages.budget import reserve_for
    from expertd.pages.memory import snapshot
    from expertd.units import parse_size

    now = snapshot()
    free = now.usable_bytes if ram is None else parse_size(ram)
    gpus = read_gpus() if vram is None else ()
    vram_nbytes = sum(g.free_nbytes for g in gpus) if vram is None else parse_size(vram)
    step = max((m.used * m.expert_nbytes for m in experts.layers), default=0)
    speed = (parse_size(bandwidth),) * 2 if bandwidth is not None else None
    disk = _probe(experts) if probe else None
    cores = physical_cores()
    machine = Machine(
        ram_nbytes=free,
        vram_nbytes=vram_nbytes,
        n_gpus=len(gpus) if vram is None else int(vram_nbytes > 0),
        physical_cores=cores,
        reserve_nbytes=reserve_for(now.limit_bytes if ram is None else free, step),
        rates=Rates(ram=speed, disk=disk, physical_cores=cores),
    )
    return machine, {
        "ram_bytes": free,
        "ram_source": "given"
        if ram is not None
        else "cgroup"
        if now.usable_bytes < now.available_bytes
        else "MemAvailable",
        "ram_total_bytes": now.total_bytes,
        "cgroup": str(now.cgroup.path) if now.cgroup else None,
        "cgroup_limit_bytes": now.cgroup.limit_bytes if now.cgroup else None,
        "swap_bytes": now.swap_total_bytes,
        "vram_bytes": vram_nbytes,
        "gpus": [{"name": g.name, "total_bytes": g.total_nbytes, "free_bytes": g.free_nbytes} for g in gpus],
        "physical_cores": cores,
        "disk_bytes_per_second": list(disk) if disk else None,
    }


def _probe(experts: ExpertMap) -> tuple[float, float]:
    from expertd.pages.disk import probe

    sizes = experts.model.file_nbytes
    measured = probe(experts.model.files[sizes.index(max(sizes))])
    return min(measured.sequential, measured.random), max(measured.sequential, measured.random)


def plan_report(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; names of keys are a contract (docs/memory.md). Sizes in bytes."""
    from expertd.model.commands import arguments, expertd_flags, left_out, llama_server_flags

    server, own = llama_server_flags(plan), expertd_flags(plan)
    reasons = [
        *({"for": "expertd", "flag": f.text, "why": f.why} for f in own),
        *({"for": "llama-server", "flag": f.text, "why": f.why} for f in server),
        *({"for": "both", "flag": "", "why": f.why} for f in left_out(plan)),
    ]
    return {
        "model": str(plan.experts.model.files[0]),
        "verdict": plan.verdict,
        "ram_ratio": round(plan.ram_ratio, 4),
        "n_ctx": plan.n_ctx,
        "n_ubatch": plan.n_ubatch,
        "kv_type": plan.kv_type,
        "kv_bytes": plan.kv.total,
        "compute_bytes": plan.compute_nbytes,
        "output_bytes": plan.output_nbytes,
        "dense_bytes": plan.experts.dense_nbytes,
        "expert_bytes": plan.experts.expert_nbytes,
        "total_bytes": plan.total_nbytes,
        "beside_experts_bytes": plan.fixed_nbytes,
        "expert_budget_bytes": plan.expert_budget_nbytes,
        "vram": {
            "n_gpu_layers": plan.offload.n_gpu_layers,
            "n_cpu_moe": plan.offload.n_cpu_moe,
            "bytes": plan.offload.nbytes,
            "override_tensor": list(_rules(plan)),
        },
        "forecast": _forecast(plan),
        "llama_server_args": arguments(server),
        "expertd_args": ["serve", *arguments(own)],
        "reasons": reasons,
        "warnings": list(plan.warnings),
    }


def _rules(plan: Plan) -> tuple[str, ...]:
    from expertd.model.offload import override_rules

    return override_rules(plan.experts, plan.offload)


def _forecast(plan: Plan) -> dict[str, Any]:
    f = plan.forecast
    low, high = f.tokens_per_second
    return {
        "tokens_per_second": {"low": round(low, 2), "high": round(high, 2)},
        "hit_ratio": {"low": round(f.hit_ratio[0], 4), "high": round(f.hit_ratio[1], 4)},
        "missed_bytes_per_token": {"low": f.missed_bytes_per_token[1], "high": f.missed_bytes_per_token[0]},
        "assumptions": list(f.assumptions),
    }


def _show(r: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from expertd.cli.inspect import printable
    from expertd.units import format_size

    console = Console(highlight=False, soft_wrap=True)
    style, meaning = _VERDICTS[r["verdict"]]
    ratio = f"RAM for experts / expert bytes in RAM: {r['ram_ratio']:.2f}"
    console.print(printable(f"{r['verdict']}: {meaning} ({ratio})", f"bold {style}"))
    table = Table.grid(padding=(0, 2))
    machine = r["machine"]
    rows = [
        ("free RAM", format_size(machine["ram_bytes"]), machine["ram_source"]),
        ("VRAM", format_size(machine["vram_bytes"]), ", ".join(g["name"] for g in machine["gpus"])),
        (
            "expert bytes",
            format_size(r["expert_bytes"]),
            f"{format_size(r['expert_budget_bytes'])} of them held in RAM",
        ),
        ("dense bytes", format_size(r["dense_bytes"]), ""),
        ("KV cache", format_size(r["kv_bytes"]), f"{r['n_ctx']} tokens in {r['kv_type']}"),
        ("compute buffer", format_size(r["compute_bytes"]), f"{r['n_ubatch']} tokens at once"),
        ("on the GPU", format_size(r["vram"]["bytes"]), f"experts of the first {r['vram']['n_cpu_moe']} layers in RAM"),
        ("swap", format_size(machine["swap_bytes"]), "not counted on"),
    ]
    for name, value, note in rows:
        if (name not in ("VRAM", "on the GPU") or r["machine"]["vram_bytes"]) and (
            name != "swap" or machine["swap_bytes"]
        ):
            table.add_row(printable(name, "bold"), value, printable(note, "dim"))
    console.print(table)
    speed = r["forecast"]["tokens_per_second"]
    console.print(f"\n[bold]decode[/bold]  {speed['low']:.3g} to {speed['high']:.3g} tokens a second, if")
    for assumption in r["forecast"]["assumptions"]:
        console.print(printable(f"  - {assumption}", "dim"))
    for program, args in (("expertd", r["expertd_args"]), ("llama-server", r["llama_server_args"])):
        console.print(f"\n[bold]{program}[/bold]")
        console.print(printable(f"  {program} {shlex.join(args)}"))
        for reason in r["reasons"]:
            if reason["for"] == program:
                console.print(printable(f"  {reason['flag']}: {reason['why']}", "dim"))
    console.print()
    for reason in r["reasons"]:
        if reason["for"] == "both":
            console.print(printable(f"  {reason['why']}", "dim"))
    for warning in r["warnings"]:
        console.print(printable(f"! {warning}", "yellow"))
