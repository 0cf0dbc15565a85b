"""docs/commands.md is what the command line says of itself."""

from __future__ import annotations

from pathlib import Path

from expertd.cli import VERBS
from tests.daemon.commands_document import document

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


def test_every_verb_and_option_is_documented_as_it_is() -> None:
    assert DOCUMENT.read_text() == document(), "write it again: python -m tests.daemon.commands_document"


def test_no_verb_is_missing() -> None:
    text = DOCUMENT.read_text()
    assert all(f"## expertd {verb}\n" in text for verb in VERBS)
