"""SIGHUP: what a new configuration changes at once, and a word for what needs a restart."""

from __future__ import annotations

import logging

from starlette.applications import Starlette

from expertd.config import Config
from expertd.daemon.settings import runtime_settings, server_settings
from expertd.runtime.service import Service
from expertd.telemetry import logs

log = logging.getLogger("expertd.daemon")


def apply(old: Config, new: Config, service: Service, app: Starlette) -> None:
    """Keys, budget, pins, reserve and log level change now. Raises ConfigError, with nothing changed, for bad keys."""
    settings = server_settings(new)
    now, later = old.changes(new)
    app.state.context.keys.replace(settings.api_keys, settings.admin_key)
    logs.set_level(new.log.level)
    service.reconfigure(runtime_settings(new))
    log.info("reloaded: %s", ", ".join(now) if now else "nothing differs that a reload applies")
    if later:
        log.warning("a restart is needed for %s", ", ".join(later))
