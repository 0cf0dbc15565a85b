"""Runs one generation for one HTTP exchange: events in, bytes out, and its end when the client goes.

1. Ask the service; the first event decides between a plain HTTP error and a response.
2. Pass text through the parser and the renderer as it comes; a whole answer collects it.
3. Meanwhile watch for the client: gone, or taking nothing, ends the generation. A silent stream gets comments.
4. At a stop of the server an open stream ends with an error event, anything else with 503.

Not here: what the bytes look like (`render`), what the text means (`output`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from expertd.errors import ExpertdError, NotReadyError
from expertd.runtime.requests import Finished, GenerationRequest, Piece, PromptProgress, Queued, TokenLogprob
from expertd.server.contract import Service
from expertd.server.errors import InternalError
from expertd.server.output.deltas import Delta, Parser
from expertd.server.record import Record
from expertd.server.sender import StreamSender
from expertd.server.wire import KEEPALIVE, JsonResponse

log = logging.getLogger("expertd.server")
_LAST_WORD_SECONDS = 1.0
"""For a client to take the error that ends its stream at a stop."""


class Renderer(Protocol):
    """The shape of one API. `add` takes what came and returns the bytes of a stream for it; `whole` is the body of an
    answer in one piece, after all has been added."""

    def begin(self) -> bytes: ...
    def queued(self, event: Queued) -> bytes: ...
    def progress(self, event: PromptProgress) -> bytes: ...
    def add(self, deltas: Sequence[Delta], logprobs: tuple[TokenLogprob, ...]) -> bytes: ...
    def finish(self, finished: Finished) -> bytes: ...
    def failed(self, error: ExpertdError) -> bytes: ...
    def whole(self, finished: Finished) -> Any: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One generation and how its answer is to look."""

    service: Service
    request: GenerationRequest
    parser: Parser
    renderer: Renderer
    stream: bool
    record: Record
    keepalive_seconds: float
    stall_seconds: float


class GenerationResponse:
    """An ASGI response that runs a `Job`. One for each exchange."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sender = StreamSender(send)
        work = asyncio.create_task(self._stream() if self._job.stream else self._whole(scope, receive, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await self._watch(work, gone)
        except asyncio.CancelledError:
            await _cancelled(work, gone)
            await self._stopping()
            return
        await _cancelled(work, gone)
        await self._sender.abandon()
        if work.cancelled():
            self._job.record.finish = self._job.record.finish or "disconnected"
            return
        work.result()

    async def _watch(self, work: asyncio.Task[None], gone: asyncio.Task[None]) -> None:
        """Returns when the work is over, the client is gone or takes nothing."""
        job, sender = self._job, self._sender
        while True:
            done, _ = await asyncio.wait(
                {work, gone}, timeout=job.keepalive_seconds / 2, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            now = self._loop.time()
            if sender.sending_since:
                if now - sender.sending_since > job.stall_seconds:
                    log.info("request %s: the client takes nothing", job.record.request_id)
                    return
            elif job.stream and now - sender.last_sent >= job.keepalive_seconds / 2:
                self._open()
                sender.put(KEEPALIVE)

    async def _stopping(self) -> None:
        """The server ends while this runs: say so instead of breaking off."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        self._job.record.finish = "stopping"
        error = NotReadyError("expertd is stopping", hint="try again later")
        if not self._sender.is_open:
            raise error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await self._sender.close(self._job.renderer.failed(error))
        await self._sender.abandon()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        events = job.service.generate(job.request)
        try:
            async for event in events:
                if isinstance(event, Piece):
                    job.record.saw_token()
                    job.renderer.add(job.parser.feed(event.text), event.logprobs)
                elif isinstance(event, Finished):
                    job.renderer.add(job.parser.finish(), ())
                    self._finished(event)
                    break
        finally:
            await events.aclose()
        if job.record.finished is not None:
            await JsonResponse(job.renderer.whole(job.record.finished))(scope, receive, send)

    async def _stream(self) -> None:
        job, sender = self._job, self._sender
        events = job.service.generate(job.request)
        try:
            async for event in events:
                self._open()
                if isinstance(event, Piece):
                    job.record.saw_token()
                    sender.put(job.renderer.add(job.parser.feed(event.text), event.logprobs))
                elif isinstance(event, Finished):
                    self._finished(event)
                    last = job.renderer.add(job.parser.finish(), ()) + job.renderer.finish(event)
                    await sender.close(last)
                    break
                elif isinstance(event, Queued):
                    sender.put(job.renderer.queued(event))
                else:
                    sender.put(job.renderer.progress(event))
        except Exception as error:
            if not sender.is_open:
                raise
            if not isinstance(error, ExpertdError):
                log.exception("request %s failed", job.record.request_id)
                error = InternalError("the request failed", hint=f"the log has more under {job.record.request_id}")
            job.record.finish = "error"
            await sender.close(job.renderer.failed(error))
        finally:
            await events.aclose()

    def _finished(self, event: Finished) -> None:
        self._job.record.finished = event
        self._job.record.finish = event.reason

    def _open(self) -> None:
        if not self._sender.is_open:
            self._sender.open(self._job.renderer.begin())


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancels and waits; the results stay with the tasks."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
