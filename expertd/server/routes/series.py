"""What a screen draws that looks on: the last minutes in figures with the present beside them, and single experts.

One small answer for each look, so that a screen that looks once a second costs next to nothing. The figures are the
daemon's (`telemetry.history`); the whole map is `watch.heatmap`'s.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from expertd.errors import RequestError
from expertd.server.context import context_of
from expertd.server.routes.watch import state_of
from expertd.server.wire import JsonResponse

MOST_EXPERTS = 1024
FEW_EXPERTS = 50
NUMBER_DIGITS = 18
"""Of the largest number that a query may hold."""


async def series(request: Request) -> Response:
    """State, requests, cache, verdict, memory, and the points after number `since` (all that are kept without it).
    `run` names the daemon's life: another one means that it was started again and counts from 0."""
    context = context_of(request)
    service, since = context.service, _number(request, "since")
    cache = {name: value for name, value in service.cache_report().items() if name != "layers"}
    now = {**state_of(service), "slots": service.slots(), "cache": cache}
    return JsonResponse({**now, **context.series(since)}, headers={"cache-control": "no-store"})


async def experts(request: Request) -> Response:
    """Single experts, hottest first: of `layer`, of index `expert`, or the first `limit` of all."""
    heat = context_of(request).service.heat
    if heat is None:
        return JsonResponse({"total": 0, "used": 0, "experts": []})
    layer, expert, limit = (_number(request, name) for name in ("layer", "expert", "limit"))
    limit = FEW_EXPERTS if limit is None else min(MOST_EXPERTS, limit)
    return JsonResponse(heat.experts(layer=layer, expert=expert, limit=limit), headers={"cache-control": "no-store"})


def _number(request: Request, name: str) -> int | None:
    """None where it is not given. Raises RequestError for what is no number."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS):
        raise RequestError(f"{name} is not a number", param=name)
    return int(text)
