"""Bytes on the wire: JSON bodies and server-sent events.

Encoding goes through one msgspec encoder; the responses here are pure ASGI and carry no state.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
STREAM_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class JsonResponse(Response):
    """A JSON body of anything that msgspec encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def data(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """One named event of a stream, as Anthropic's and OpenAI's newer API have them."""
    return b"event: " + event.encode() + b"\ndata: " + encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore."""
    return b": " + text.encode() + b"\n\n"
