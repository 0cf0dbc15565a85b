"""Errors as HTTP: one table from the codes of `expertd.errors` to statuses, and the bodies that clients parse.

Not here: the errors of the floors below; each is an `ExpertdError` whose code stands in `STATUS`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from expertd.errors import ContextFullError, ExpertdError, NotReadyError, QueueFullError, RequestError

STATUS: dict[str, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "usage": 400,
    "config": 400,
    "budget": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "profile_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "state": 409,
    "body_too_large": 413,
    "queue_full": 429,
    "engine": 500,
    "engine_hung": 503,
    "pages": 500,
    "model": 500,
    "model_format": 500,
    "model_unsupported": 500,
    "model_changed": 500,
    "model_unreadable": 500,
    "bench": 500,
    "internal": 500,
    "not_implemented": 501,
    "cancelled": 503,
    "not_ready": 503,
}
_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnauthorizedError(ExpertdError):
    code = "invalid_api_key"


class ForbiddenError(ExpertdError):
    code = "forbidden"


class NotFoundError(ExpertdError):
    """No such route, model or profile."""

    code = "not_found"


class MethodNotAllowedError(ExpertdError):
    code = "method_not_allowed"


class SlowRequestError(ExpertdError):
    """The client took too long to send its request."""

    code = "request_timeout"


class BodyTooLargeError(ExpertdError):
    code = "body_too_large"


class NotImplementedHereError(ExpertdError):
    """A known endpoint that this daemon does not serve."""

    code = "not_implemented"


class InternalError(ExpertdError):
    """What a client reads when something went wrong that nobody foresaw; the log has the rest."""

    code: ClassVar[str] = "internal"


def status_of(error: ExpertdError) -> int:
    return STATUS.get(error.code, 500)


def openai_type(status: int) -> str:
    return _TYPE.get(status, "invalid_request_error" if status < 500 else "server_error")


def openai_body(error: ExpertdError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`; a context that is full adds llama-server's two counts."""
    inner: dict[str, Any] = {
        "message": error.line(),
        "type": openai_type(status_of(error)),
        "param": error.param or None if isinstance(error, RequestError) else None,
        "code": error.code,
    }
    if isinstance(error, ContextFullError):
        inner |= {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx, "param": "messages"}
    return {"error": inner}


def anthropic_body(error: ExpertdError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    status = status_of(error)
    kind = _ANTHROPIC_TYPE.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.line()}, "request_id": request_id}


def error_headers(error: ExpertdError) -> list[tuple[bytes, bytes]]:
    """Retry-After for what passes by itself, WWW-Authenticate for a missing key."""
    if isinstance(error, QueueFullError):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_seconds))).encode())]
    if isinstance(error, NotReadyError):
        return [(b"retry-after", b"5")]
    if isinstance(error, UnauthorizedError):
        return [(b"www-authenticate", b'Bearer realm="expertd"')]
    return []
