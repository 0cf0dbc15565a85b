"""Looking on: the expert cache in numbers, as a heat map, and as a stream of changes."""

from __future__ import annotations

import asyncio
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
    return JsonResponse({**_state(service), **known, **context.status()})


async def heatmap(request: Request) -> Response:
    """JSON, or one byte an expert where the client accepts bytes: two bits of state above six bits of score."""
    found = context_of(request).service.heatmap()
    if _BYTES not in request.headers.get("accept", ""):
        return JsonResponse(found)
    rows = zip(found["scores"], found["state"], strict=True)
    body = bytes(s << 6 | round(score * 63) for scores, state in rows for score, s in zip(scores, state, strict=True))
    layers = ",".join(map(str, found["layers"]))
    headers = {"x-expertd-layers": layers, "x-expertd-experts": str(found["n_experts"])}
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
    return {"state": _state(service), "cache": dict(service.cache_report()), "slots": service.slots()}


def _state(service: Service) -> dict[str, Any]:
    progress = service.progress
    return {
        "state": service.state,
        "failure": service.failure,
        "progress": {"what": progress.what, "done": progress.done, "total": progress.total},
    }
