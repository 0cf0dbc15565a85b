"""`expertd version`: what a bug report needs to name."""

from __future__ import annotations

import click


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the versions of expertd, llama-cpp-python, Python and the kernel."""
    import json
    import platform
    from importlib.metadata import PackageNotFoundError, requires, version

    from expertd import __version__

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    wanted = [r for r in requires("expertd") or [] if r.startswith("llama-cpp-python")]
    rows = {
        "expertd": __version__,
        "llama-cpp-python": of("llama-cpp-python"),
        "llama-cpp-python range": wanted[0].removeprefix("llama-cpp-python") if wanted else "unknown",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for name, value in rows.items():
        click.echo(f"{name:<24}{value}")
