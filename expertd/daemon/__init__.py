"""The composition root: the only place that knows every floor. Runs one daemon from its configuration to its end."""

from __future__ import annotations

from collections.abc import Callable

from expertd.config import Config


def serve(config: Config, reload: Callable[[], Config]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. `reload` reads the configuration again on SIGHUP.

    Raises ExpertdError for what stops it from starting: no model, an address in use, a bad key file.
    """
    from expertd.engine import openmp
    from expertd.telemetry import logs

    logs.set_up(config.log.level, config.log.format)
    # Before anything imports llama_cpp, which the modules below do.
    openmp.load(config.engine.threads)

    from expertd.daemon.life import run

    return run(config, reload)
