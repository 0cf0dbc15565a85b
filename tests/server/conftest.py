"""A running server: the real service on the built-in model, over real sockets, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from expertd.engine.settings import EngineSettings
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings
from expertd.server.app import create_app
from expertd.server.run import HttpServer
from expertd.server.settings import ServerSettings

N_CTX = 512
ADMIN_KEY = "admin-key"


class LiveServer:
    """The server of one test module, and the loop it lives on."""

    def __init__(self, service: Any, settings: ServerSettings) -> None:
        self.service, self.settings = service, settings
        self.loop = uvloop.new_event_loop()
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._main, name="test-server")

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self.failure = error
            self.ready.set()
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self.app = create_app(self.service, self.settings, lambda: b"# no metrics here\n")
        self.http = HttpServer(self.app, self.settings)
        self.http.bind()
        if hasattr(self.service, "start"):
            self.service.start()
        serving = asyncio.create_task(self.http.serve())
        while not self.http.started:
            await asyncio.sleep(0.01)
        while hasattr(self.service, "wait_changed") and self.service.state not in ("ready", "failed"):
            await self.service.wait_changed()
        self.ready.set()
        await serving
        if hasattr(self.service, "stop"):
            await self.service.stop()

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def local(self) -> httpx.Client:
        """A client over the unix socket."""
        transport = httpx.HTTPTransport(uds=str(self.settings.socket_path))
        return httpx.Client(base_url="http://localhost", transport=transport, timeout=60)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection((self.settings.host, self.http.port), timeout=30)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the server's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def start(self) -> LiveServer:
        self.thread.start()
        assert self.ready.wait(120)
        if self.failure is not None:
            raise self.failure
        return self

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.http.stop)
            self.thread.join(30)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure


def runtime_settings(model: Path, **changes: Any) -> RuntimeSettings:
    engine = EngineSettings(model=model, n_ctx=N_CTX, threads=1, threads_batch=1, prompt_cache_nbytes=8 << 20)
    return replace(RuntimeSettings(engine=engine, steering="on", budget_share=0.5, max_queue=4), **changes)


def server_settings(directory: Path, **changes: Any) -> ServerSettings:
    return replace(
        ServerSettings(port=0, socket_path=directory / "admin.sock", admin_key=ADMIN_KEY, drain_seconds=2), **changes
    )


@pytest.fixture(scope="session")
def live(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server for all that does not need its own."""
    service = Service(runtime_settings(demo_model))
    server = LiveServer(service, server_settings(tmp_path_factory.mktemp("live"))).start()
    assert service.state == "ready", service.failure
    yield server
    server.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers with their own service and settings; stops them afterwards."""
    running: list[LiveServer] = []

    def start(service: Any, **changes: Any) -> LiveServer:
        server = LiveServer(service, server_settings(tmp_path, **changes)).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()
