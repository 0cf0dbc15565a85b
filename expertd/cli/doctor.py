"""`expertd doctor`: what on this machine, and on the way to a model, would make expertd slow or stop it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from expertd.config import Config
    from expertd.telemetry.doctor.check import Check, Subject

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--config", "file", type=click.Path(path_type=Path), help="Configuration file.")
@click.option("--probe/--no-probe", default=True, help="Measure the model's disk for a second or two.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: Path | None, file: Path | None, probe: bool, as_json: bool) -> int:
    """Check this machine, its limits and the path to MODEL (else the configured one). Exits 1 where a check fails."""
    import json

    from expertd.config import load_config
    from expertd.telemetry.doctor.run import examine

    config = load_config(file, os.environ, {"model.path": str(model) if model else None})
    checks = []
    for check in examine(subject(config), probe=probe):
        checks.append(check)
        if not as_json:
            _print(check)
    if as_json:
        click.echo(json.dumps({"checks": [c.json() for c in checks]}, indent=2))
    else:
        counts = {status: sum(c.status == status for c in checks) for status in _COLOURS}
        click.echo(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    return 1 if any(c.status == "fail" for c in checks) else 0


def subject(config: Config) -> Subject:
    """What the configuration says of what is to be examined."""
    from expertd.telemetry.doctor.check import Subject

    budget = config.cache.budget
    return Subject(
        model=Path(config.model.path).expanduser() if config.model.path else None,
        state_directory=config.places.state_directory,
        threads=config.engine.threads,
        budget_nbytes=budget if isinstance(budget, int) else None,
        steering=config.cache.steering,
        load=config.engine.load,
        lock_dense=config.cache.lock_dense,
        n_gpu_layers=config.engine.n_gpu_layers,
    )


def _print(check: Check) -> None:
    click.echo(f"{click.style(f'{check.status:<4}', fg=_COLOURS[check.status])}  {check.id:<15}  {check.value}")
    if check.fix:
        click.echo(f"      {check.why}\n      {check.fix}")
