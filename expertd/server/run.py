"""Listening: one uvicorn on a TCP port and a unix socket, whose life the daemon decides.

The unix socket speaks plain HTTP even where TCP speaks TLS, and what comes over it is marked as local. Signals are the
daemon's: uvicorn would raise them again after the end and skip what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Generator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from expertd.errors import ConfigError, ExpertdError
from expertd.server.gate import LOCAL
from expertd.server.protocol import limited_protocol
from expertd.server.settings import ServerSettings

_BACKLOG = 512
_KEEPALIVE_SECONDS = 30
_DESCRIPTORS_FOR_FILES = 128
"""What connections leave of the descriptors that a process may have: for the model, profiles, locks and the loop."""
_LEAST_CONNECTIONS = 16


class ListenError(ExpertdError):
    """An address or socket cannot be listened on."""

    code = "listen"


class HttpServer:
    """`bind`, then `serve` until `stop`. Lives on the event loop (uvloop, where the daemon runs one)."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._tcp: socket.socket | None = None
        self._unix: socket.socket | None = None
        self._server: _Server | None = None
        self.port = settings.port
        """The port that is listened on; after `bind` never 0."""

    @property
    def url(self) -> str:
        scheme = "https" if self._settings.tls_certificate else "http"
        host = self._settings.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def started(self) -> bool:
        return self._server is not None and self._server.started

    def bind(self) -> None:
        """Takes the address and the socket. Raises ListenError that names them."""
        self._tcp = _bind_tcp(self._settings.host, self._settings.port)
        self.port = int(self._tcp.getsockname()[1])
        if self._settings.socket_path is not None:
            try:
                self._unix = _bind_unix(self._settings.socket_path)
            except ListenError:
                self._tcp.close()
                raise
        self._app.state.context.url = self.url

    async def serve(self) -> None:
        """Answers until `stop`; running answers get `drain_seconds`. Raises ConfigError for a bad certificate."""
        if self._tcp is None:
            self.bind()
        assert self._tcp is not None
        config = _config(self._app, self._settings, tls=True)
        local = _config(_Local(self._app), self._settings, tls=False)
        self._server = _Server(config, local, self._unix, self._app.state.context.stopping)
        try:
            await self._server.serve(sockets=[self._tcp])
        finally:
            if self._unix is not None and self._settings.socket_path is not None:
                self._settings.socket_path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends `serve`; from the event loop."""
        if self._server is not None:
            self._server.should_exit = True


class _Local:
    """Marks what comes over the unix socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, LOCAL: True}, receive, send)


class _Server(uvicorn.Server):
    """A second listener with its own configuration, and no signals."""

    def __init__(
        self, config: uvicorn.Config, local: uvicorn.Config, unix: socket.socket | None, stopping: asyncio.Event
    ) -> None:
        super().__init__(config)
        self._local, self._unix, self._stopping = local, unix, stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._unix is None:
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._local_protocol, sock=self._unix, backlog=_BACKLOG)
        self.servers.append(server)

    def _local_protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self._local.http_protocol_class
        return make(config=self._local, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def _config(app: ASGIApp, settings: ServerSettings, *, tls: bool) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=limited_protocol(settings.header_seconds, settings.body_seconds, _most_connections(settings)),
        ws="none",
        lifespan="on" if tls else "off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEPALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    config.load()
    if tls and settings.tls_certificate is not None:
        config.ssl = _tls(settings.tls_certificate, settings.tls_key)
    return config


def _most_connections(settings: ServerSettings) -> int:
    """Of one listener. A daemon that has no descriptor left cannot save what it learned either."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return settings.max_connections
    return min(settings.max_connections, max(_LEAST_CONNECTIONS, limit - _DESCRIPTORS_FOR_FILES))


def _tls(certificate: Path, key: Path | None) -> ssl.SSLContext:
    if key is None:
        raise ConfigError("server.tls_certificate needs server.tls_key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"the certificate {certificate} or its key {key} cannot be used: {error}",
            hint="both must be readable PEM files that belong together",
        ) from error
    return context


def _bind_tcp(host: str, port: int) -> socket.socket:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"{host!r} is no address of this machine: {error}", hint="check server.host") from error
    family, kind, number, _, address = found[0]
    sock = socket.socket(family, kind, number)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"{where} is in use", hint="stop what listens there or choose another --port") from error
        if error.errno == errno.EACCES:
            raise ListenError(f"{where} may not be listened on", hint="ports below 1024 need a privilege") from error
        raise ListenError(f"{where} cannot be listened on: {error.strerror}", hint="check server.host") from error
    sock.setblocking(False)
    return sock


def _bind_unix(path: Path) -> socket.socket:
    """A socket that its owner and group may use. One that nobody listens on any more is replaced."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(f"the socket {path} cannot be made: {error}", hint="check server.socket") from error
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenError(f"{path} is there and is no socket", hint="choose another server.socket")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"the socket {path} cannot be made: {error}", hint="check server.socket") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ListenError(f"the socket {path} cannot be made: {error}", hint="check server.socket") from error
    raise ListenError(f"another expertd listens on {path}", hint="stop it or choose another server.socket")
