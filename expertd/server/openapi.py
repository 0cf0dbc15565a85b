"""The OpenAPI 3.1 document, made from the table of endpoints and the structs of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from expertd import __version__
from expertd.server import replies
from expertd.server.routes.series import NUMBER_DIGITS
from expertd.server.routes.table import Operation, Query

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
"""One event of a stream; `data` is JSON, or [DONE]."""
_ERRORS = {
    400: "The request is off",
    401: "A key is needed",
    403: "Not from here, or not with this key",
    404: "Not here",
    409: "Not in this state: torn, in use, running already, or nothing is steered",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    501: "Not served",
    503: "Not ready; see Retry-After",
}


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The document as JSON-ready data."""
    shown = [o for o in operations if not o.hidden]
    kinds = [k for o in shown for k in (o.body, o.reply) if k is not None]
    schemas, components = msgspec.json.schema_components([*kinds, replies.Error], ref_template=_REF)
    by_kind = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=False)}
    error = schemas[-1]
    paths: dict[str, Any] = {}
    for o in shown:
        paths.setdefault(_PARAMETER.sub(r"{\1}", o.path), {})[o.method.lower()] = _operation(o, by_kind, error)
    return {
        "openapi": "3.1.0",
        "info": {"title": "expertd", "version": __version__, "summary": "Mixture-of-Experts models larger than RAM"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _operation(o: Operation, schemas: dict[int, Any], error: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"summary": o.summary, "operationId": _name(o), "responses": _responses(o, schemas, error)}
    if o.open:
        out["security"] = []
    if o.body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[id(o.body)]}}}
    parameters = [_in_path(name) for name in _PARAMETER.findall(o.path)] + [_in_query(q) for q in o.query]
    if parameters:
        out["parameters"] = parameters
    return out


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(q: Query) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": 10**NUMBER_DIGITS - 1}
    return {"name": q.name, "in": "query", "required": False, "description": q.meaning, "schema": number}


def _responses(o: Operation, schemas: dict[int, Any], error: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if 501 not in o.errors:
        schema = schemas.get(id(o.reply), {"type": "string"} if o.content != "application/json" else {})
        content: dict[str, Any] = {o.content: {"schema": schema}}
        if o.streams:
            content["text/event-stream"] = {"schema": _EVENT}
        out["200"] = {"description": "OK", "content": content}
    refused = () if o.open else (401,)
    for status in sorted({*o.errors, *refused, 403}):
        shape = {} if o.path.startswith("/v1/messages") or o.path == "/readyz" else error
        out[str(status)] = {"description": _ERRORS[status], "content": {"application/json": {"schema": shape}}}
    return out


def _name(o: Operation) -> str:
    words = re.findall(r"[A-Za-z0-9]+", o.path)
    return "_".join([o.method.lower(), *words]).lower()
