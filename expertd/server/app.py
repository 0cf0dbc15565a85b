"""The ASGI app: routes from the table, errors as JSON, the gate around it all.

Not here: listening (`run`), the endpoints (`routes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from expertd.errors import ExpertdError
from expertd.server.context import Context, context_of, record_of
from expertd.server.contract import Service
from expertd.server.errors import ForbiddenError, MethodNotAllowedError, NotFoundError
from expertd.server.gate import Gate, error_response, given_key, is_local
from expertd.server.keys import KeyRing
from expertd.server.openapi import document
from expertd.server.routes.table import OPERATIONS, Operation
from expertd.server.settings import ServerSettings
from expertd.server.wire import encode


def create_app(
    service: Service,
    settings: ServerSettings,
    metrics: Callable[[], bytes],
    status: Callable[[], Mapping[str, Any]] = dict,
    series: Callable[[int | None], Mapping[str, Any]] = lambda since: {},
) -> Starlette:
    """The app. Its `state.context` holds the counts that `telemetry` reads and the keys that a reload replaces;
    `status` tells more for `/expertd/status`, `series` for `/expertd/series` (points after the number given)."""
    keys = KeyRing(settings.api_keys, settings.admin_key)
    context = Context(service, settings, keys, metrics, status=status, series=series)
    app = Starlette(
        routes=[r for o in OPERATIONS for r in _routes(o)] + [Route("/openapi.json", _openapi, methods=["GET"])],
        middleware=[Middleware(Gate, settings=settings, keys=keys, counts=context.counts)],
        exception_handlers={ExpertdError: _on_error, HTTPException: _on_http},
        lifespan=_lifespan,
    )
    app.state.context = context
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.context.texts.shutdown(wait=False, cancel_futures=True)


def _routes(operation: Operation) -> list[Route]:
    endpoint = _endpoint(operation)
    return [Route(path, endpoint, methods=[operation.method]) for path in (operation.path, *operation.also)]


def _endpoint(operation: Operation) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        record_of(request).route = operation.path
        if operation.admin:
            _require_admin(request)
        return await operation.endpoint(request)

    return endpoint


def _require_admin(request: Request) -> None:
    """Raises ForbiddenError unless the caller may change things."""
    keys = context_of(request).keys
    if is_local(request.scope) or keys.admits_admin(given_key(dict(request.scope["headers"]))):
        return
    hint = "send the admin key" if keys.has_admin else "set server.admin_key_file"
    raise ForbiddenError("this changes the cache and needs the admin key", hint=f"{hint} or use the unix socket")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertdError)
    return error_response(request.scope, error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == 405:
        response = error_response(request.scope, MethodNotAllowedError(f"{request.method} does not go with {path}"))
        response.headers.update(error.headers or {})
        return response
    return error_response(request.scope, NotFoundError(f"nothing is at {path}", hint="see /openapi.json"))


async def _openapi(request: Request) -> Response:
    record_of(request).route = "/openapi.json"
    return Response(_document(), media_type="application/json")


@cache
def _document() -> bytes:
    return encode(document(OPERATIONS))
