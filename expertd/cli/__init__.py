"""The command line: finds the verb's file by its name, and turns every error into one line and an exit code.

A verb is a module of this package with a `command`. It is imported when it is called, and imports what is heavy inside
its function, so that `expertd --help` and any verb's --help answer at once. Exit codes: 0 ok, 1 failed, 2 usage, 3 not
ready.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from expertd.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ExpertdError

VERBS = {
    "serve": "Run the daemon: load a model, steer its experts, answer over HTTP.",
    "demo": "Run the built-in tiny model end to end and print what the cache did.",
    "inspect": "Tell what a GGUF file holds: experts, dense weights, sizes, identity.",
    "plan": "Tell whether and how a model will run here, with ready command lines.",
    "warm": "Bring a model's experts into the page cache, with or without a daemon.",
    "rehearse": "Run a demo's prompts, learn and warm their experts, and run them again.",
    "profile": "List, show, move, merge and compare saved hot maps.",
    "status": "Tell what a running daemon does and what holds it back.",
    "top": "Watch a running daemon in the terminal.",
    "pin": "Lock experts of a running daemon in memory.",
    "unpin": "Give pinned experts up; they stay resident.",
    "evict": "Drop experts of a running daemon from memory.",
    "trace": "Record the router's choices of a running daemon (off by default).",
    "replay": "Replay recorded routing against cache policies and budgets.",
    "bench": "Measure: servers over HTTP, steered against plain, models by geometry.",
    "doctor": "Check this machine, its limits and the path to a model.",
    "config": "Show or check the configuration and where each value comes from.",
    "version": "Print the versions that matter in a report.",
}


class _Verbs(click.Group):
    """Lists verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = importlib.import_module(f"expertd.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="expertd", message="%(version)s")
def root() -> None:
    """Runs Mixture-of-Experts models that are larger than RAM, by steering the page cache expert by expert."""


def main() -> None:
    """The entry point of the `expertd` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line; returns its exit code. Errors are printed as one line to standard error."""
    try:
        code = root.main(arguments, prog_name="expertd", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        where = f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
        click.echo(f"expertd: {error.format_message()}{where}", err=True)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("expertd: interrupted", err=True)
        return 130
    except ExpertdError as error:
        click.echo(f"expertd: {error.line()}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (a pager that was quit); so does what Python would flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if os.environ.get("EXPERTD_DEBUG"):
            raise
        click.echo(f"expertd: internal error: {error!r}; set EXPERTD_DEBUG=1 for where it arose", err=True)
        return EXIT_FAILED
