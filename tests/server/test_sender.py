"""The writer of streams: nothing lost or out of order, fast pieces share writes, and it can be broken off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.server.sender import StreamSender


class Wire:
    """Takes messages; each write takes `seconds`."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.messages: list[Any] = []
        self.seconds, self.error = seconds, error

    async def send(self, message: Any) -> None:
        await asyncio.sleep(self.seconds)
        if self.error is not None and self.messages:
            raise self.error
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages[1:])


@given(
    pieces=st.lists(st.tuples(st.binary(max_size=3), st.sampled_from([None, 0.0, 0.001, 0.006])), max_size=12),
    seconds=st.sampled_from([0.0, 0.002]),
)
@settings(max_examples=40, deadline=None)
def test_all_is_written_in_order(pieces: list[tuple[bytes, float | None]], seconds: float) -> None:
    wire = Wire(seconds)

    async def run() -> None:
        sender = StreamSender(wire.send)
        sender.open(b"[")
        for piece, pause in pieces:
            sender.put(piece)
            if pause is not None:
                await asyncio.sleep(pause)
        await sender.close(b"]")

    asyncio.run(run())
    assert wire.body == b"[" + b"".join(p for p, _ in pieces) + b"]"
    assert [m["type"] for m in wire.messages[:2]] == ["http.response.start", "http.response.body"]
    assert [m["more_body"] for m in wire.messages[1:]] == [True] * (len(wire.messages) - 2) + [False]


def test_fast_pieces_share_writes() -> None:
    wire = Wire()

    async def run() -> None:
        sender = StreamSender(wire.send)
        sender.open(b"")
        for _ in range(200):
            sender.put(b"x")
            await asyncio.sleep(0)
        await sender.close(b"")

    asyncio.run(run())
    assert wire.body == b"x" * 200
    assert len(wire.messages) < 100


def test_it_can_be_broken_off_and_tells_what_went_wrong() -> None:
    async def run() -> None:
        stuck = StreamSender(Wire(seconds=60).send)
        stuck.open(b"a")
        await asyncio.sleep(0.01)
        await stuck.abandon()
        await StreamSender(Wire().send).abandon()
        broken = StreamSender(Wire(error=OSError("gone")).send)
        broken.open(b"a")
        with pytest.raises(OSError, match="gone"):
            await broken.close(b"b")
        await broken.abandon()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
