"""uvicorn's HTTP protocol with what it lacks: time limits on head and body, a limit on the head's size and on the
number of connections. A connection that breaks one is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_MAX_HEAD_NBYTES = 64 << 10
_BODY_GRACE_SECONDS = 5.0


def limited_protocol(header_seconds: float, body_seconds: float, max_connections: int) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`. The body's limit here is a little longer than the app's,
    which answers 408; this one ends those who do not listen."""

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self._deadline: asyncio.TimerHandle | None = None
            self._head_nbytes = 0
            self._in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.close()
                return
            self._limit(header_seconds)

        def connection_lost(self, exc: Exception | None) -> None:
            self._limit(None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_nbytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_nbytes > _MAX_HEAD_NBYTES and not self.transport.is_closing():
                self.transport.close()

        def on_message_begin(self) -> None:
            self._in_head, self._head_nbytes = True, 0
            self._limit(header_seconds)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._limit(body_seconds + _BODY_GRACE_SECONDS)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._limit(None)
            super().on_message_complete()

        def _limit(self, seconds: float | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(seconds, self._too_slow) if seconds else None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol
