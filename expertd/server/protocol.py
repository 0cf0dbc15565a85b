"""uvicorn's HTTP protocol with what it lacks: time limits on head and body, a limit on the head's size and on the
number of connections. A connection that breaks one is closed.

At the limit on connections room is made:

1. The connection goes that has waited longest for its client to finish a request. Whoever opens many and sends nothing
   thus drives out his own, and does not lock others out until their time is up.
2. Where all are answered or idle after an answer, the newcomer goes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_MAX_HEAD_NBYTES = 64 << 10
_BODY_GRACE_SECONDS = 5.0


class _Room:
    """The connections of one listener. Lives on the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: set[HttpToolsProtocol] = set()
        self._unfinished: dict[HttpToolsProtocol, None] = {}
        """Those whose client owes the rest of a request, longest first."""

    def admit(self, newcomer: HttpToolsProtocol) -> bool:
        """Whether there is room, which case 1 makes."""
        if len(self._held) >= self._most:
            oldest = next(iter(self._unfinished), None)  # 1
            if oldest is None:
                return False  # 2
            self.leave(oldest)
            oldest.transport.close()
        self._held.add(newcomer)
        self._unfinished[newcomer] = None
        return True

    def begun(self, connection: HttpToolsProtocol) -> None:
        """A request began where none is being answered."""
        if connection in self._held:
            self._unfinished.setdefault(connection)

    def finished(self, connection: HttpToolsProtocol) -> None:
        self._unfinished.pop(connection, None)

    def leave(self, connection: HttpToolsProtocol) -> None:
        self._held.discard(connection)
        self._unfinished.pop(connection, None)


def limited_protocol(header_seconds: float, body_seconds: float, max_connections: int) -> type[asyncio.Protocol]:
    """The protocol class of one listener, for `uvicorn.Config(http=...)`. The body's limit here is a little longer than
    the app's, which answers 408; this one ends those who do not listen."""
    room = _Room(max_connections)

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
            if not room.admit(self):
                transport.close()
                return
            self._limit(header_seconds)

        def connection_lost(self, exc: Exception | None) -> None:
            self._limit(None)
            room.leave(self)
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
            if self.cycle is None or self.cycle.response_complete:
                room.begun(self)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._limit(body_seconds + _BODY_GRACE_SECONDS)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._limit(None)
            room.finished(self)
            super().on_message_complete()

        def _limit(self, seconds: float | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(seconds, self._too_slow) if seconds else None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol
