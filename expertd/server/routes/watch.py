"""Looking on: the expert cache in numbers, as a heat map, and as a stream of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from expertd.errors import QueueFullError
from expertd.server.context import Context, context_of
from expertd.server.contract import Service
from expertd.server.generation import disconnected
from expertd.server.wire import KEEPALIVE, STREAM_HEADERS, JsonResponse, named

_MAX_WATCHERS = 16
_SECONDS = 1.0
_KEEPALIVE_TICKS = 10
_BYTES = "application/octet-stream"
_MODEL_FIELDS = (
    "id", "path", "fingerprint", "created", "n_ctx", "n_ctx_train", "n_vocab", "arch", "description", "nbytes",
    "n_params", "n_layers", "n_experts", "n_experts_used", "expert_nbytes",
)  # fmt: skip


async def cache(request: Request) -> Response:
    return JsonResponse(context_of(request).service.cache_report())


async def status(request: Request) -> Response:
    """All in one: state, progress, model, cache, and what the daemon adds."""
    context = context_of(request)
    service, model = context.service, context.service.model
    known = {
        "url": context.url,
        "model": {name: getattr(model, name) for name in _MODEL_FIELDS} if model else None,
        "cache": dict(service.cache_report()),
        "slots": service.slots(),
    }
    return JsonResponse({**state_of(service), **known, **context.status()})


async def heatmap(request: Request) -> Response:
    """JSON, or one byte an expert where the client accepts bytes: two bits of state (0 absent, 1 resident, 2 pinned,
    3 just missed) above six bits of heat by rank. The bytes carry a tag; asking again with it costs next to nothing
    while nothing happens."""
    service = context_of(request).service
    if _BYTES not in request.headers.get("accept", ""):
        return JsonResponse(service.heatmap())
    if service.heat is None:
        return _cells(b"", [], 0, "none")
    if request.headers.get("if-none-match") == f'"{service.heat.version()}"':
        return Response(
            status_code=304, headers={"etag": request.headers["if-none-match"], "cache-control": "no-cache"}
        )
    cells = service.heat.cells()
    return _cells(cells.body, cells.layers, cells.n_experts, cells.version)


def _cells(body: bytes, layers: Sequence[int], n_experts: int, version: str) -> Response:
    headers = {
        "x-expertd-layers": ",".join(map(str, layers)),
        "x-expertd-experts": str(n_experts),
        "etag": f'"{version}"',
        "cache-control": "no-cache",
    }
    return Response(body, media_type=_BYTES, headers=headers)


async def events(request: Request) -> ASGIApp:
    """State, cache and slots, each when it has changed; looked at once a second while somebody watches."""
    context = context_of(request)
    if context.watchers >= _MAX_WATCHERS:
        raise QueueFullError(f"{_MAX_WATCHERS} clients watch already", retry_after_seconds=10)
    return _Events(context)


class _Events:
    """One watcher's stream."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._context.watchers += 1
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._context.watchers -= 1
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        silent, stopping = 0, self._context.stopping
        while not stopping.is_set():
            body = self._changes()
            silent = 0 if body else silent + 1
            if silent >= _KEEPALIVE_TICKS:
                body, silent = KEEPALIVE, 0
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            try:
                await asyncio.wait_for(stopping.wait(), _SECONDS)
            except TimeoutError:
                continue
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _changes(self) -> bytes:
        out = []
        for kind, value in _looks(self._context.service).items():
            if self._seen.get(kind) != value:
                self._seen[kind] = value
                out.append(named(kind, value))
        return b"".join(out)


def _looks(service: Service) -> dict[str, Any]:
    return {"state": state_of(service), "cache": dict(service.cache_report()), "slots": service.slots()}


def state_of(service: Service) -> dict[str, Any]:
    """State, failure and progress."""
    progress = service.progress
    return {
        "state": service.state,
        "failure": service.failure,
        "progress": {"what": progress.what, "done": progress.done, "total": progress.total},
    }
