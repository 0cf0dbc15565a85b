"""`expertd serve`: the daemon. Here are only its flags; `daemon` composes and runs it."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("serve")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Configuration file.")
@click.option("--model", help="GGUF file; any shard of a split model.")
@click.option("--budget", help="Bytes of experts to hold: auto, 20GiB or 25%.")
@click.option("--steering", type=click.Choice(["auto", "on", "off"]), help="Whether to steer the page cache.")
@click.option("--policy", help="Which experts stay: auto, lru, hybrid ...")
@click.option("--profile", help="The saved hot map to load and to teach.")
@click.option("--warm", type=click.Choice(["none", "dense", "profile", "all"]), help="What to bring in at the start.")
@click.option("--ctx", type=int, help="Tokens that a conversation can hold.")
@click.option("--threads", type=int, help="Threads for decoding; 0 is one a physical core.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 takes a free one.")
@click.option("--socket", help="Unix socket for the admin verbs.")
@click.option("--log-format", type=click.Choice(["auto", "text", "journal", "json"]), help="Form of the log.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable.")
def command(file: Path | None, settings: tuple[str, ...], **flags: str | int | None) -> int:
    """Load a model, steer its experts, answer over HTTP until stopped."""
    from expertd.config import load_config
    from expertd.daemon import serve

    names = {
        "model": "model.path", "budget": "cache.budget", "steering": "cache.steering", "policy": "cache.policy",
        "profile": "profile.name", "warm": "warm.level", "ctx": "engine.n_ctx", "threads": "engine.threads",
        "host": "server.host", "port": "server.port", "socket": "server.socket", "log_format": "log.format",
    }  # fmt: skip
    given: dict[str, object] = {names[flag]: value for flag, value in flags.items() if value is not None}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set {setting}: write SECTION.KEY=VALUE")
        given[key.strip()] = value
    return serve(load_config(file, os.environ, given), lambda: load_config(file, os.environ, given))
