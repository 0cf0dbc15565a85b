"""The dashboard's files, as they lie in `server/static`: locked to this origin, and asked for again each time by their
tag, since after an upgrade a page and a script of different versions would not fit."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import lru_cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from expertd.server.errors import NotFoundError

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def index(request: Request) -> Response:
    return _serve(request, "index.html")


async def asset(request: Request) -> Response:
    return _serve(request, request.path_params["path"])


def _serve(request: Request, path: str) -> Response:
    found = _file(path)
    if found is None:
        raise NotFoundError(f"nothing is at {request.url.path[:128]}", hint="see /openapi.json")
    body, etag = found
    headers = {**_HEADERS, "cache-control": "no-cache", "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return Response(body, media_type=kind, headers=headers)


@lru_cache(maxsize=64)
def _file(path: str) -> tuple[bytes, str] | None:
    """A file's bytes and tag; None for what is not a plain name of a packaged file."""
    steps = path.split("/")
    if len(steps) > 3 or any(s in ("", ".", "..") or "\\" in s or "\0" in s for s in steps):
        return None
    place = resources.files("expertd.server").joinpath("static", *steps)
    if not place.is_file():
        return None
    body = place.read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:20]}"'
