"""Connections that never finish what they begin."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
from collections.abc import Iterator

BEGINNINGS = (
    b"",
    b"POST /v1/chat/compl",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
    b"GET /health HTTP/1.1\r\n",
)
"""What each says and then no more: nothing, half a request line, half a header, no end of the headers."""
BODIES = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 500\r\n\r\n{"prompt": "Once',
)
"""All headers and a piece of the body: these may take the longest."""

_DESCRIPTORS = 4096


@contextlib.contextmanager
def half_open(port: int, n: int, beginnings: tuple[bytes, ...] = BEGINNINGS) -> Iterator[list[socket.socket]]:
    """`n` of them on loopback, in turn by how they begin; closed at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    opened: list[socket.socket] = []
    try:
        for i in range(n):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            opened.append(connection)
            # One that the other side has ended already counts as well.
            with contextlib.suppress(ConnectionError):
                connection.sendall(beginnings[i % len(beginnings)])
        yield opened
    finally:
        for connection in opened:
            connection.close()


def n_closed(connections: list[socket.socket]) -> int:
    """How many the other side has ended; whatever it said before is thrown away."""
    poll = select.poll()
    by_fd = {connection.fileno(): connection for connection in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return sum(_is_ended(by_fd[fd]) for fd, _ in poll.poll(0))


def _is_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
