"""From the configuration to what each floor is told."""

from __future__ import annotations

from pathlib import Path

from expertd.config import Config, read_keys
from expertd.engine.settings import EngineSettings
from expertd.errors import UsageError
from expertd.runtime.settings import RuntimeSettings
from expertd.server.settings import ServerSettings

_PROMPT_CACHE_NBYTES = 256 << 20
"""What `auto` keeps for conversations that are not the running one."""


def runtime_settings(config: Config) -> RuntimeSettings:
    """Raises UsageError when no model is named."""
    budget, share = _size_or_share(config.cache.budget)
    pin_budget, pin_share = _size_or_share(config.cache.pin_budget)
    return RuntimeSettings(
        engine=engine_settings(config),
        alias=config.model.alias,
        steering=config.cache.steering,
        budget=budget,
        budget_share=share,
        policy=config.cache.policy,
        half_life=config.cache.half_life,
        pin_budget=pin_budget,
        pin_budget_share=pin_share,
        reserve=_number(config.cache.reserve),
        lock_dense=config.cache.lock_dense,
        warm_level=config.warm.level,
        ready_requires=config.warm.ready_requires,
        profile=config.profile.name,
        save_seconds=config.profile.save_seconds,
        max_queue=config.server.max_queue,
        order=config.server.order,
        request_seconds=config.server.request_seconds,
        hang_seconds=config.engine.hang_seconds,
        state=config.places.state_directory,
        trace=config.trace.enabled,
        trace_path=Path(config.trace.path).expanduser() if config.trace.path else None,
        trace_bytes=config.trace.max_bytes,
    )


def engine_settings(config: Config) -> EngineSettings:
    engine = config.engine
    if not config.model.path:
        raise UsageError("no model is named", hint="give --model FILE or set model.path")
    cache = _number(engine.prompt_cache)
    return EngineSettings(
        model=Path(config.model.path).expanduser(),
        n_ctx=engine.n_ctx,
        n_batch=engine.n_batch,
        n_ubatch=engine.n_ubatch,
        threads=engine.threads,
        threads_batch=engine.threads_batch,
        kv_type=engine.kv_type,
        flash_attention=engine.flash_attention,
        n_gpu_layers=engine.n_gpu_layers,
        n_cpu_moe=engine.n_cpu_moe,
        override_tensor=tuple(engine.override_tensor),
        lazy_load=engine.load == "lazy",
        prompt_cache_nbytes=_PROMPT_CACHE_NBYTES if cache is None else cache,
    )


def server_settings(config: Config) -> ServerSettings:
    """Reads the key files. Raises ConfigError for one that cannot be read."""
    server, places = config.server, config.places
    admin = read_keys(places.admin_key_file) if places.admin_key_file else ()
    return ServerSettings(
        host=server.host,
        port=server.port,
        socket_path=places.socket,
        api_keys=tuple(read_keys(places.api_keys_file)) if places.api_keys_file else (),
        admin_key=admin[0] if admin else "",
        max_body_nbytes=server.max_body,
        max_tokens=server.max_tokens or None,
        request_seconds=server.request_seconds,
        allowed_hosts=tuple(server.allowed_hosts),
        cors_origins=tuple(server.cors_origins),
        tls_certificate=Path(server.tls_certificate) if server.tls_certificate else None,
        tls_key=Path(server.tls_key) if server.tls_key else None,
        drain_seconds=server.drain_seconds,
        sampling=config.sampling.sampling(),
    )


def _number(value: int | str) -> int | None:
    """None for "auto"."""
    return None if isinstance(value, str) else value


def _size_or_share(value: int | str) -> tuple[int | None, float | None]:
    """(bytes, None), (None, share) or (None, None) for auto."""
    if isinstance(value, int):
        return value, None
    if value.endswith("%"):
        return None, float(value[:-1]) / 100
    return None, None
