"""Llama 3's tool calls: the whole answer is `{"name": ..., "parameters": {...}}`, several divided by `;`.

A JSON answer is a call only where its name is one of the tools; anything else is content.
"""

from __future__ import annotations

from enum import Enum

from expertd.server.output.calls import CallScanner
from expertd.server.output.deltas import Content, Delta, first_marker, held_back, without

PYTHON = "<|python_tag|>"
_MARKERS = (PYTHON, "<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")


class _State(Enum):
    BEGIN = "begin"
    CALL = "call"
    BETWEEN = "between"
    TEXT = "text"


class Llama3Parser:
    """Calls at the beginning of the answer; from the first other character on all is content."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._state = _State.BEGIN
        self._held = ""
        self._raw = ""
        self._calls = 0
        self._call = CallScanner(0, names)

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        self._held += text
        while self._step(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if self._state is _State.CALL and not self._call.started:
            out.append(Content(without(self._raw + self._held, _MARKERS)))
        elif self._held and self._state in (_State.BEGIN, _State.TEXT):
            out.append(Content(self._held))
        self._held = ""
        return out

    def _step(self, out: list[Delta]) -> bool:
        match self._state:
            case _State.BEGIN | _State.BETWEEN:
                return self._begin()
            case _State.CALL:
                return self._json(out)
            case _State.TEXT:
                return self._text(out)

    def _begin(self) -> bool:
        start = self._held.lstrip(" \t\r\n;" if self._state is _State.BETWEEN else None)
        for marker in _MARKERS:
            if start.startswith(marker):
                self._held = start[len(marker) :]
                return True
        if not start or any(m.startswith(start) for m in _MARKERS):
            self._held = start if self._state is _State.BETWEEN else self._held
            return False
        if start[0] == "{":
            self._raw = self._held[: len(self._held) - len(start)] if self._state is _State.BEGIN else ""
            self._held = start
            self._state, self._call = _State.CALL, CallScanner(self._calls, self._names)
        else:
            self._held = self._held if self._state is _State.BEGIN else start
            self._state = _State.TEXT
        return True

    def _json(self, out: list[Delta]) -> bool:
        taken = self._call.feed(self._held, out)
        self._raw += self._held[:taken]
        self._held = self._held[taken:]
        if self._call.done or (self._call.failed and self._call.started):
            self._calls += 1
            self._state = _State.BETWEEN
            return True
        if self._call.failed:
            self._held, self._state = self._raw + self._held, _State.TEXT
            return True
        return False

    def _text(self, out: list[Delta]) -> bool:
        at, marker = first_marker(self._held, _MARKERS)
        cut = at if at >= 0 else len(self._held) - held_back(self._held, _MARKERS)
        if cut:
            out.append(Content(self._held[:cut]))
        self._held = self._held[cut + len(marker) :]
        return at >= 0
