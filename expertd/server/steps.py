"""A long piece of work for one exchange: its events as a stream, or its last event as JSON. It ends with the client.

Work is an async generator of JSON-ready events, of which the last is the result; closing it cancels the work. Not here:
generations, whose answers have shapes of their own (`generation`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from expertd.errors import ExpertdError, NotReadyError
from expertd.server.errors import openai_body
from expertd.server.generation import disconnected
from expertd.server.wire import DONE, KEEPALIVE, STREAM_HEADERS, JsonResponse, data

_KEEPALIVE_SECONDS = 10.0

Events = AsyncGenerator[dict[str, Any], None]


class StepsResponse:
    """An ASGI response. The first event is awaited before the head is sent, so that an error before it is a plain HTTP
    error. `stopping` ends it with an error."""

    def __init__(self, events: Events, *, stream: bool, stopping: asyncio.Event) -> None:
        self._events, self._is_stream, self._stopping = events, stream, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._stream(send) if self._is_stream else self._whole(scope, receive, send))
        ends = [asyncio.create_task(disconnected(receive)), asyncio.create_task(self._stopping.wait())]
        try:
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, *ends):
                task.cancel()
            await asyncio.wait({work, *ends})
            await self._events.aclose()
        if not work.cancelled():
            work.result()
        elif self._stopping.is_set():
            raise NotReadyError("expertd is stopping", hint="try again later")

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        last: Mapping[str, Any] = {}
        async for event in self._events:
            last = event
        await JsonResponse(last)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        started = False
        upcoming: asyncio.Task[Mapping[str, Any]] | None = None
        try:
            while True:
                upcoming = upcoming or asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait({upcoming}, timeout=_KEEPALIVE_SECONDS)
                if not started and (not done or upcoming.exception() is None):
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    started = True
                body = data(upcoming.result()) if done else KEEPALIVE
                upcoming = None if done else upcoming
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except StopAsyncIteration:
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except ExpertdError as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": data(openai_body(error)), "more_body": False})
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
