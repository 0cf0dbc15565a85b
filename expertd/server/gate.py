"""The first and last thing of every exchange: request id, who may pass, limits, errors as JSON, the access line.

1. Host and Origin (TCP only): 403.
2. A preflight is answered here.
3. Keys, where there are some: 401. Probes and the dashboard's files are open; the unix socket needs none.
4. The body's size: 413.
5. Whatever comes up from below becomes an error body; what nobody foresaw goes to the log, not to the client.

Pure ASGI: nothing is buffered, and a cancelled request is cancelled all the way down.
"""

from __future__ import annotations

import logging
import re

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertd.errors import ExpertdError
from expertd.server.errors import (
    ForbiddenError,
    InternalError,
    UnauthorizedError,
    anthropic_body,
    error_headers,
    openai_body,
    status_of,
)
from expertd.server.hosts import CORS_MAX_AGE, CORS_METHODS, Neighbourhood
from expertd.server.keys import KeyRing
from expertd.server.limits import LimitedReceive, too_large
from expertd.server.record import RECORD, Record, new_request_id
from expertd.server.settings import ServerSettings
from expertd.server.wire import JsonResponse

log = logging.getLogger("expertd.server")
LOCAL = "expertd.local"
"""Set in the scope of connections over the unix socket (see `run`)."""
_OPEN = frozenset({"/", "/health", "/v1/health", "/livez", "/readyz", "/favicon.ico"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def is_local(scope: Scope) -> bool:
    """Whether the caller came over the unix socket."""
    return bool(scope.get(LOCAL))


def error_response(scope: Scope, error: ExpertdError) -> Response:
    """The error in the shape of the API that was called."""
    record: Record | None = scope.get(RECORD)
    anthropic = scope["path"].startswith("/v1/messages")
    body = anthropic_body(error, record.request_id if record else "") if anthropic else openai_body(error)
    response = JsonResponse(body, status_code=status_of(error))
    response.raw_headers += error_headers(error)
    return response


def given_key(headers: dict[bytes, bytes]) -> str | None:
    """The key of a request: a bearer token, or X-Api-Key."""
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    key = headers.get(b"x-api-key")
    return key.decode("latin-1").strip() if key else None


class Gate:
    """The middleware. `counts` gets one for each answer, by (route, status)."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keys: KeyRing, counts: dict[tuple[str, int], int]
    ) -> None:
        self._app, self._settings, self._keys, self._counts = app, settings, keys, counts
        self._neighbours = Neighbourhood(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = _record(scope, headers)
        scope[RECORD] = record
        extra = [(b"x-request-id", record.request_id.encode())]

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._count(record)  # now, so that whoever has the answer finds it counted
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            await self._pass(scope, headers, receive, tell, extra)
        except ClientDisconnect:
            record.finish = "disconnected"
        except ExpertdError as error:
            await self._failed(scope, error, record, receive, tell)
        except Exception:
            log.exception("request %s: %s %s", record.request_id, record.method, record.path)
            unforeseen = InternalError("something went wrong here", hint=f"the log has more under {record.request_id}")
            await self._failed(scope, unforeseen, record, receive, tell)
        finally:
            if not record.status:
                self._count(record)
            record.log()

    def _count(self, record: Record) -> None:
        key = (record.route or "other", record.status or 499)
        self._counts[key] = self._counts.get(key, 0) + 1

    async def _failed(self, scope: Scope, error: ExpertdError, record: Record, receive: Receive, send: Send) -> None:
        if not record.status:
            await error_response(scope, error)(scope, receive, send)

    async def _pass(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send, extra: list[tuple[bytes, bytes]]
    ) -> None:
        if not is_local(scope) and self._check_place(scope, headers, extra):
            await _preflight(scope, headers)(scope, receive, send)
            return
        self._check_key(scope, headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_nbytes:
            raise too_large(self._settings.max_body_nbytes)
        limited = LimitedReceive(receive, self._settings.max_body_nbytes, self._settings.body_seconds)
        await self._app(scope, limited, send)

    def _check_place(self, scope: Scope, headers: dict[bytes, bytes], extra: list[tuple[bytes, bytes]]) -> bool:
        """Host and Origin. True for a preflight that may pass."""
        host = _text(headers.get(b"host"))
        if not self._neighbours.host_allowed(host):
            raise ForbiddenError("this Host is not answered", hint="call localhost or add it to server.allowed_hosts")
        origin = _text(headers.get(b"origin"))
        if origin is None:
            return False
        if self._neighbours.origin_allowed(origin, host):
            extra += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
                (b"vary", b"origin"),
            ]
            return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if self._neighbours.refuses_foreign_origins:
            raise ForbiddenError("this Origin may not call", hint="add it to server.cors_origins")
        return False

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if not self._keys.required or is_local(scope) or path in _OPEN or path.startswith("/static/"):
            return
        if not self._keys.admits(given_key(headers)):
            raise UnauthorizedError(
                "a valid API key is needed", hint="send Authorization: Bearer <key> or X-Api-Key: <key>"
            )


def _record(scope: Scope, headers: dict[bytes, bytes]) -> Record:
    given = _text(headers.get(b"x-request-id")) or ""
    client = scope.get("client")
    return Record(
        request_id=given if _REQUEST_ID.fullmatch(given) else new_request_id(),
        method=scope["method"],
        path=scope["path"][:256],
        client="unix" if is_local(scope) else client[0] if client else "",
    )


def _preflight(scope: Scope, headers: dict[bytes, bytes]) -> Response:
    response = Response(status_code=204)
    response.raw_headers = [
        (b"access-control-allow-methods", CORS_METHODS),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
        (b"access-control-max-age", CORS_MAX_AGE),
    ]
    return response


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value is not None else None
