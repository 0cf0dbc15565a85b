"""`expertd unpin`: gives pins up. The choice of experts is `pin`'s."""

from __future__ import annotations

from typing import Any

import click

from expertd.cli.pin import act, choice_options


@click.command("unpin")
@choice_options
def command(**options: Any) -> None:
    """Give pinned experts of a running daemon up, all of them where none is named; they stay resident."""
    act("unpin", **options)
