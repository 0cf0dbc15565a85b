"""Writes one stream. Pieces that come faster than every few milliseconds share a write.

A write costs the kernel and the client more than all the rest of a token's way through the server. A model that gives a
token every 20 ms is written token by token; one that gives thousands a second is not slowed by its own stream.
"""

from __future__ import annotations

import asyncio

from starlette.types import Send

from expertd.server.wire import STREAM_HEADERS

_WINDOW_SECONDS = 0.004


class StreamSender:
    """`open` once, `put` as it comes, `close` once. One task of its own writes, so that the order holds; cancel it with
    `abandon`. Of the event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.last_sent = self._loop.time()
        """When the last write began."""
        self.sending_since = 0.0
        """When the write that runs now began; 0 while none does."""

    @property
    def is_open(self) -> bool:
        return self._task is not None

    def open(self, body: bytes) -> None:
        """Head and first bytes."""
        self._parts.append(body)
        self._wake.set()
        self._task = asyncio.create_task(self._run())

    def put(self, body: bytes) -> None:
        if body:
            self._parts.append(body)
            self._wake.set()

    async def close(self, body: bytes) -> None:
        """The last bytes; returns when all is written. Raises what a write raised."""
        assert self._task is not None
        self._parts.append(body)
        self._closing = True
        self._wake.set()
        await asyncio.shield(self._task)

    async def abandon(self) -> None:
        """Writes nothing more; what a write raised is nobody's any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while True:
            await self._wake.wait()
            early = self.last_sent + _WINDOW_SECONDS - self._loop.time()
            if early > 0 and not self._closing:
                await asyncio.sleep(early)
            self._wake.clear()
            last, body = self._closing, b"".join(self._parts)
            self._parts.clear()
            self.sending_since = self.last_sent = self._loop.time()
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            self.sending_since = 0.0
            if last:
                return
