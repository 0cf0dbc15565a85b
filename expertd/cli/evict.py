"""`expertd evict`: drops experts from memory. The choice of experts is `pin`'s."""

from __future__ import annotations

from typing import Any

import click

from expertd.cli.pin import act, choice_options


@click.command("evict")
@choice_options
def command(**options: Any) -> None:
    """Drop experts of a running daemon from memory, pinned or not. They are read again when they are needed."""
    act("evict", **options)
