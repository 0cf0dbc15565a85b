"""Writes docs/commands.md from the command line: `python -m tests.daemon.commands_document > docs/commands.md`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from expertd.cli import VERBS, root

_HEAD = """# The command line

Every verb and option, written from the code by `python -m tests.daemon.commands_document` and held to it by a test.

Exit codes: 0 ok, 1 failed, 2 usage, 3 not ready (no daemon answers, it is still loading, or a rehearsal missed its
targets). An error is one line on standard error: what, where, and what to do next. Verbs that read have `--json`; verbs
that take long show a bar on a terminal and plain lines elsewhere. Sizes are `20GiB`, `1.5G` (binary) or `900MB`
(decimal). Verbs that speak to a daemon find its admin socket by themselves; `--socket` or `--url` name another.
"""


def document() -> str:
    parts = [_HEAD]
    for name in VERBS:
        context = click.Context(root, info_name="expertd")
        command = root.get_command(context, name)
        assert command is not None
        parts += list(_sections(command, click.Context(command, info_name=name, parent=context), 2))
    return "\n".join(parts)


def _sections(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{'#' * level} {context.command_path}\n"
    yield f"`{context.command_path} {usage}`\n"
    yield f"{' '.join((command.help or '').split())}\n"
    rows = [record for p in command.get_params(context) if (record := p.get_help_record(context)) is not None]
    rows = [(names, " ".join(text.split())) for names, text in rows if "--help" not in names]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield "\n".join(f"| `{names}` | {text} |".replace("|", "\\|").replace("\\| ", "| ").replace(" \\|", " |")
                        for names, text in rows) + "\n"  # fmt: skip
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _sections(inner, click.Context(inner, info_name=name, parent=context), level + 1)


if __name__ == "__main__":
    print(document(), end="")
