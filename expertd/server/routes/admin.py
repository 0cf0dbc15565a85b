"""Verbs that change the expert cache: warm, pin, unpin, evict, rehearse. The unix socket's, or the admin key's.

What blocks runs in a thread of its own kind (`asyncio.to_thread`), so that texts need not wait for disks.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from expertd.errors import RequestError, UsageError
from expertd.runtime.actions import Actions
from expertd.runtime.rehearsal import RehearsalOrder
from expertd.runtime.selection import Selection, parse
from expertd.runtime.warmup import WarmOrder
from expertd.server.bodies.admin import RehearsalBody, SelectionBody, WarmBody
from expertd.server.bodies.decode import decode, read
from expertd.server.context import context_of
from expertd.server.steps import Events, StepsResponse
from expertd.server.wire import JsonResponse
from expertd.units import parse_size

_EVENTS = "text/event-stream"


async def warm(request: Request) -> ASGIApp:
    """Progress as server-sent events where the client accepts them or asks for a stream; else the result at the end."""
    body = await _read_or_default(request)
    service = context_of(request).service
    order = WarmOrder(body.level, body.profile, _size(body.budget), bool(body.pin))
    return _steps(request, service.warm(order), body.stream)


async def _read_or_default(request: Request) -> WarmBody:
    raw = await request.body()
    return decode(raw, WarmBody) if raw.strip() else WarmBody()


def _size(budget: int | str | None) -> int | None:
    try:
        return None if budget is None or budget == "auto" else parse_size(budget)
    except UsageError as error:
        raise RequestError(error.message, hint=error.hint, param="budget") from error


async def warmed(request: Request) -> Response:
    """The last warm-up: how far it is, or what came of it."""
    made = context_of(request).service.actions.warm_up
    return JsonResponse(made.report() if made is not None else {"phase": "none"})


async def rehearse(request: Request) -> ASGIApp:
    body = await read(request, RehearsalBody)
    order = RehearsalOrder(
        tuple(body.prompts), body.profile, body.max_tokens, body.target_tps, body.target_ttft_seconds,
        pin=bool(body.pin), add=bool(body.add),
    )  # fmt: skip
    return _steps(request, context_of(request).service.rehearse(order), body.stream)


async def pin(request: Request) -> Response:
    body, selection, actions = await _selected(request)
    if selection.everything and not body.all:
        raise RequestError("say which experts to pin", hint="a profile, layers, a share, experts, or all of them")
    return JsonResponse(await asyncio.to_thread(actions.pin, selection))


async def unpin(request: Request) -> Response:
    _, selection, actions = await _selected(request)
    return JsonResponse(await asyncio.to_thread(actions.unpin, selection))


async def evict(request: Request) -> Response:
    body, selection, actions = await _selected(request)
    return JsonResponse(await asyncio.to_thread(actions.evict, selection, everything=bool(body.all)))


async def _selected(request: Request) -> tuple[SelectionBody, Selection, Actions]:
    raw = await request.body()
    body = decode(raw, SelectionBody) if raw.strip() else SelectionBody()
    actions = context_of(request).service.actions
    selection = parse(
        actions.steering.layout, profile=body.profile, layers=body.layers, share=body.share, experts=body.experts or ()
    )
    return body, selection, actions


def _steps(request: Request, events: Events, stream: bool | None) -> StepsResponse:
    wanted = stream if stream is not None else _EVENTS in request.headers.get("accept", "")
    return StepsResponse(events, stream=wanted, stopping=context_of(request).stopping)
