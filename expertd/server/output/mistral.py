"""Mistral's tool calls: `[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` once a call."""

from __future__ import annotations

from enum import Enum

from expertd.server.output.calls import CallScanner, ValueScanner
from expertd.server.output.deltas import CallArguments, CallStart, Content, Delta, first_marker, held_back, without

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_DROPPED = ("</s>", "[/INST]", "[INST]", ARGS, CALL_ID)
_MARKERS = (CALLS, *_DROPPED)


class _State(Enum):
    TEXT = "text"
    OPENED = "opened"
    LIST = "list"
    CALL = "call"
    NAME = "name"
    ARGUMENTS = "arguments"


class MistralParser:
    """Content, then calls. Control tokens of the format never become content; a call that is cut off before its name
    is known is dropped."""

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._held = ""
        self._calls = 0
        self._call = CallScanner(0)
        self._raw = ""
        self._value = ValueScanner()
        self._after_call = False

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        self._held += text
        while self._step(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if self._state is _State.TEXT and self._held and not (self._calls and self._held.isspace()):
            out.append(Content(self._held))
        elif self._state is _State.NAME and self._name():
            out += [CallStart(self._calls, self._name()), CallArguments(self._calls, "{}")]
        self._held = ""
        return out

    def _step(self, out: list[Delta]) -> bool:
        match self._state:
            case _State.TEXT:
                return self._text(out)
            case _State.OPENED:
                return self._opened()
            case _State.LIST:
                return self._list()
            case _State.CALL:
                return self._json(out)
            case _State.NAME:
                return self._named(out)
            case _State.ARGUMENTS:
                return self._arguments(out)

    def _text(self, out: list[Delta]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        at, marker = first_marker(self._held, _MARKERS)
        cut = at if at >= 0 else len(self._held) - held_back(self._held, _MARKERS)
        shown = self._held[:cut].rstrip() if marker in ("", CALLS) else self._held[:cut]
        if shown:
            self._after_call = False
            out.append(Content(shown))
        if at < 0:
            self._held = self._held[len(shown) :]
            return False
        self._held = self._held[at + len(marker) :]
        if marker == CALLS:
            self._state = _State.OPENED
        return True

    def _opened(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = _State.LIST if self._held[0] == "[" else _State.NAME
        if self._state is _State.LIST:
            self._held = self._held[1:]
        return True

    def _list(self) -> bool:
        self._held = self._held.lstrip(" \t\r\n,")
        if not self._held:
            return False
        if self._held[0] == "{":
            self._state, self._call, self._raw = _State.CALL, CallScanner(self._calls), ""
        else:
            self._held = self._held[1:] if self._held[0] == "]" else self._held
            self._state = _State.TEXT
        return True

    def _json(self, out: list[Delta]) -> bool:
        taken = self._call.feed(self._held, out)
        self._raw += self._held[:taken]
        self._held = self._held[taken:]
        if self._call.done or (self._call.failed and self._call.started):
            self._count()
            self._state = _State.LIST
            return True
        if self._call.failed:
            out.append(Content(without(self._raw, _MARKERS)))
            self._state = _State.TEXT
            return True
        return False

    def _count(self) -> None:
        self._calls += 1
        self._after_call = True

    def _name(self) -> str:
        return self._held.split(CALL_ID)[0].split(ARGS)[0].strip()

    def _named(self, out: list[Delta]) -> bool:
        at, marker = first_marker(self._held, (ARGS, "{"))
        if at < 0:
            return False
        name = self._held[:at].split(CALL_ID)[0].strip()
        self._held = self._held[at + (len(marker) if marker == ARGS else 0) :]
        out.append(CallStart(self._calls, name))
        self._state, self._value = _State.ARGUMENTS, ValueScanner()
        return True

    def _arguments(self, out: list[Delta]) -> bool:
        if not self._value.kind:
            self._held = self._held.lstrip()
        for i, char in enumerate(self._held):
            ended = self._value.take(char)
            if ended is not None:
                cut = i + 1 if ended else i
                self._pass_on(self._held[:cut], out)
                self._held = self._held[cut:]
                self._count()
                self._state = _State.TEXT
                return True
        self._pass_on(self._held, out)
        self._held = ""
        return False

    def _pass_on(self, text: str, out: list[Delta]) -> None:
        if text:
            out.append(CallArguments(self._calls, text))
