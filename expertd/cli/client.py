"""A running daemon, seen from a verb: over its admin socket, or over HTTP where `--url` says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from expertd.errors import ExpertdError, NotReadyError, UsageError

if TYPE_CHECKING:
    import httpx

_F = TypeVar("_F", bound=Callable[..., Any])


def daemon_options(function: _F) -> _F:
    """--socket and --url, passed on as `socket` and `url`."""
    function = click.option(
        "--url", help="Reach the daemon at this URL instead; needs the admin key to change things."
    )(function)
    return click.option("--socket", type=click.Path(path_type=Path), help="The daemon's admin socket.")(function)


class DaemonClient:
    """Calls a running daemon. Every error is an ExpertdError: NotReadyError where nobody answers."""

    def __init__(self, socket: Path | None, url: str | None, *, seconds: float = 30.0) -> None:
        import httpx

        self._where = url or ""
        headers = {}
        if key := os.environ.get("EXPERTD_ADMIN_KEY") or os.environ.get("EXPERTD_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        if url:
            self._http = httpx.Client(base_url=url, timeout=seconds, headers=headers)
            return
        path = socket or _default_socket()
        if path is None:
            raise UsageError("no admin socket is known", hint="give --socket or --url")
        self._where = str(path)
        transport = httpx.HTTPTransport(uds=str(path))
        self._http = httpx.Client(transport=transport, base_url="http://localhost", timeout=seconds, headers=headers)

    def get(self, path: str) -> Any:
        """The JSON answer."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body or {})

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path, None)

    def text(self, path: str) -> str:
        """The answer as text, whatever its status."""
        return self._send("GET", path, None).text

    def content(self, path: str, kind: str, tag: str = "") -> tuple[bytes, Mapping[str, str]] | None:
        """The answer's bytes and headers, asked for as media type `kind`; None while its tag is still `tag`."""
        answer = self._send("GET", path, None, {"accept": kind, **({"if-none-match": tag} if tag else {})})
        if answer.status_code == 304:
            return None
        if answer.status_code >= 400:
            raise _refused(answer)
        return answer.content, answer.headers

    def events(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """The JSON data of server-sent events, until the stream ends."""
        import httpx

        try:
            with self._http.stream("POST" if body is not None else "GET", path, json=body) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _refused(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if isinstance(event, dict) and isinstance(event.get("error"), dict):
                            raise RefusedError(f"the daemon says: {event['error'].get('message')}")
                        yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        answer = self._send(method, path, body)
        if answer.status_code >= 400:
            raise _refused(answer)
        return answer.json() if answer.content else None

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        import httpx

        try:
            return self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> NotReadyError:
        return NotReadyError(
            f"no daemon answers at {self._where}: {error}",
            hint="start `expertd serve`, or name it by --socket or --url",
        )

    def close(self) -> None:
        self._http.close()


class RefusedError(ExpertdError):
    """The daemon answered with an error."""

    code = "refused"


def _refused(answer: httpx.Response) -> ExpertdError:
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error.get("code", ""))
    except (ValueError, KeyError, TypeError):
        message, code = answer.text[:200] or answer.reason_phrase, ""
    if answer.status_code == 503:
        return NotReadyError(message)
    suffix = f" ({code})" if code and code not in message else ""
    return RefusedError(f"the daemon says {answer.status_code}: {message}{suffix}")


def _default_socket() -> Path | None:
    from expertd.config import load_config
    from expertd.config.paths import SYSTEM_SOCKET

    found = load_config(None, os.environ, {}).places.socket
    if found is not None and found.exists():
        return found
    return SYSTEM_SOCKET if SYSTEM_SOCKET.exists() else found
