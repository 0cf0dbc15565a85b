"""Tool calls between `<tool_call>` tags: JSON (Hermes, Qwen), and the tagged forms of Qwen3-Coder and GLM.

JSON arguments are passed on as they come; tagged ones when the call is closed, since only then is their type known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from expertd.server.output.calls import CallScanner
from expertd.server.output.deltas import CallArguments, CallStart, Content, Delta, first_marker, held_back, without

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BARE = "<function="
"""Qwen3-Coder often forgets the opening tag."""


class _State(Enum):
    TEXT = "text"
    OPENED = "opened"
    JSON = "json"
    TAGGED = "tagged"
    CLOSING = "closing"
    BROKEN = "broken"


class HermesParser:
    """Content and tool calls. `parameters` maps a tool's name to its JSON schema, for the types of tagged arguments.

    What is between the tags and is no call becomes content; the tags never do. A call that is cut off before its name
    and arguments are known is dropped.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], *, bare: bool = False) -> None:
        self._parameters = parameters
        self._markers = (OPEN, CLOSE, BARE) if bare else (OPEN, CLOSE)
        self._state = _State.TEXT
        self._held = ""
        self._raw = ""
        self._calls = 0
        self._call = CallScanner(0)
        self._after_call = False

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        self._held += text
        while self._step(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if self._state is _State.TAGGED:
            self._tagged(self._held, out)
        elif self._state is _State.TEXT and self._held and not (self._calls and self._held.isspace()):
            out.append(Content(self._held))
        self._held = self._raw = ""
        return out

    def _step(self, out: list[Delta]) -> bool:
        """One move; True while there is more to do."""
        match self._state:
            case _State.TEXT:
                return self._text(out)
            case _State.OPENED:
                return self._opened()
            case _State.JSON:
                return self._json(out)
            case _State.TAGGED:
                return self._until_close(out)
            case _State.CLOSING:
                return self._closing()
            case _State.BROKEN:
                return self._broken()

    def _text(self, out: list[Delta]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        at, marker = first_marker(self._held, self._markers)
        if at >= 0:
            self._show(self._held[:at].rstrip(), out)
            self._held = self._held[at + (0 if marker == BARE else len(marker)) :]
            if marker != CLOSE:
                self._state = _State.OPENED
            return True
        cut = len(self._held) - held_back(self._held, self._markers)
        shown = self._held[:cut].rstrip()
        self._show(shown, out)
        self._held = self._held[len(shown) :]
        return False

    def _show(self, text: str, out: list[Delta]) -> None:
        if text:
            self._after_call = False
            out.append(Content(text))

    def _opened(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = _State.JSON if self._held[0] == "{" else _State.TAGGED
        self._call, self._raw = CallScanner(self._calls), ""
        return True

    def _json(self, out: list[Delta]) -> bool:
        taken = self._call.feed(self._held, out)
        self._raw += self._held[:taken]
        self._held = self._held[taken:]
        if self._call.done or (self._call.failed and self._call.started):
            self._count()
            self._state = _State.CLOSING if self._call.done else _State.BROKEN
            return True
        if self._call.failed:
            self._held, self._state = self._raw + self._held, _State.TAGGED
            return True
        return False

    def _count(self) -> None:
        self._calls += 1
        self._after_call = True

    def _until_close(self, out: list[Delta]) -> bool:
        at = self._held.find(CLOSE)
        if at < 0:
            return False
        inner, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._state = _State.TEXT
        self._tagged(inner, out)
        return True

    def _tagged(self, inner: str, out: list[Delta]) -> None:
        found = tagged_call(inner, self._parameters)
        if found is None:
            self._show(without(inner, self._markers).strip(), out)
            return
        name, arguments = found
        out += [CallStart(self._calls, name), CallArguments(self._calls, arguments)]
        self._count()

    def _broken(self) -> bool:
        """The rest of a call whose JSON went wrong is nobody's."""
        at = self._held.find(CLOSE)
        if at < 0:
            self._held = self._held[len(self._held) - held_back(self._held, (CLOSE,)) :]
            return False
        self._held, self._state = self._held[at + len(CLOSE) :], _State.TEXT
        return True

    def _closing(self) -> bool:
        """After a call's JSON: the closing tag, or another call at once."""
        self._held = self._held.lstrip()
        if self._held.startswith(CLOSE):
            self._held, self._state = self._held[len(CLOSE) :], _State.TEXT
            return True
        if not self._held or CLOSE.startswith(self._held):
            return False
        self._state = _State.OPENED if self._held[0] == "{" else _State.TEXT
        return True


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.:-]+)\s*(?=<arg_key>|\Z)")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def tagged_call(inner: str, parameters: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """(name, arguments as JSON) of Qwen3-Coder's or GLM's call; None where it is neither."""
    if (found := _FUNCTION.fullmatch(inner)) is not None:
        name, pairs = found[1].strip(), _PARAMETER.findall(found[2])
    elif (glm := _GLM_NAME.match(inner)) is not None and (glm[1] in parameters or "<arg_key>" in inner):
        name, pairs = glm[1], _GLM_PAIR.findall(inner)
    else:
        return None
    schema = parameters.get(name, {}).get("properties", {})
    arguments = {key.strip(): _typed(value, schema.get(key.strip())) for key, value in pairs}
    return name, msgspec.json.encode(arguments).decode()


def _typed(text: str, schema: object) -> object:
    """A tagged value by its schema's type: JSON unless a string is wanted or it is no JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text.strip().encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError):
        return text
