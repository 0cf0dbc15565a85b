"""Recorded routes: start, stop, and the file. The admin's, since routes tell something of the text."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from expertd.errors import StateError
from expertd.server.bodies.admin import TraceBody
from expertd.server.bodies.decode import decode
from expertd.server.context import context_of
from expertd.server.wire import JsonResponse


async def status(request: Request) -> Response:
    return JsonResponse(context_of(request).service.actions.tracing.status())


async def start(request: Request) -> Response:
    raw = await request.body()
    body = decode(raw, TraceBody) if raw.strip() else TraceBody()
    tracing = context_of(request).service.actions.tracing
    return JsonResponse(await asyncio.to_thread(tracing.start, body.max_bytes))


async def stop(request: Request) -> Response:
    return JsonResponse(await asyncio.to_thread(context_of(request).service.actions.tracing.stop))


async def file(request: Request) -> Response:
    """The file as it is now; while recording, up to the last whole second."""
    path = context_of(request).service.actions.tracing.path
    if path is None or not path.is_file():
        raise StateError("nothing has been recorded", hint="start it: `expertd trace start`")
    return FileResponse(path, media_type="application/octet-stream")
