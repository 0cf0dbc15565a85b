"""The size of a request's body and the time it may take."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from expertd.errors import ExpertdError
from expertd.server.errors import BodyTooLargeError, SlowRequestError
from expertd.units import format_size


def too_large(most_nbytes: int) -> ExpertdError:
    return BodyTooLargeError(
        f"the body is larger than {format_size(most_nbytes)}", hint="send less or raise server.max_body"
    )


class LimitedReceive:
    """ASGI's receive with limits on the body; after the body it waits for the disconnect without any."""

    def __init__(self, receive: Receive, most_nbytes: int, seconds: float) -> None:
        self._receive = receive
        self._left = most_nbytes
        self._most = most_nbytes
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise SlowRequestError("the request's body did not come in time") from None
        self._left -= len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._left < 0:
            raise too_large(self._most)
        return message
