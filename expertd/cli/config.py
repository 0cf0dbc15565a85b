"""`expertd config`: what is set and where it came from, whether it is sound, and the commented file.

No secret is printed: keys lie in files, and of these only the path is a setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from expertd.config import Config

_FILE = click.option("--config", "file", type=click.Path(path_type=Path), help="The file to read.")


@click.group("config")
def command() -> None:
    """Show or check the configuration."""


@command.command()
@_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: Path | None, as_json: bool) -> None:
    """Print every setting, its value and where it came from."""
    config = _load(file)
    click.echo(_json(config) if as_json else "\n".join(_table(config)))


@command.command()
@_FILE
def check(file: Path | None) -> None:
    """Check the configuration and the key files that it names; prints one line."""
    from expertd.config import read_keys

    config = _load(file)
    for path in (config.places.api_keys_file, config.places.admin_key_file):
        if path is not None:
            read_keys(path)
    click.echo(f"{config.file or 'no file'}: in order")


@command.command()
def template() -> None:
    """Print a commented file with every key and its default."""
    from expertd.config.document import template as text

    click.echo(text(), nl=False)


def _load(file: Path | None) -> Config:
    from expertd.config import load_config

    return load_config(file, os.environ, {})


def _table(config: Config) -> Iterable[str]:
    from expertd.config.values import toml_text

    rows = [(s.key, toml_text(value, s), origin) for s, value, origin in config.rows()]
    keys, values = max(len(r[0]) for r in rows), min(48, max(len(r[1]) for r in rows))
    return [f"{key:<{keys}}  {value:<{values}}  {origin}" for key, value, origin in rows]


def _json(config: Config) -> str:
    import json

    settings = {s.key: {"value": value, "origin": origin} for s, value, origin in config.rows()}
    return json.dumps({"file": str(config.file) if config.file else None, "settings": settings}, indent=2)
