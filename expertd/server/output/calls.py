"""Reading one tool call out of JSON as it arrives: `{"name": ..., "arguments": {...}}`.

The arguments are passed on as they come, as the model wrote them; the name must be known first, so arguments that come
before it wait. Not here: what surrounds the JSON (`hermes`, `mistral`, `llama3`).
"""

from __future__ import annotations

from enum import Enum

import msgspec

from expertd.server.output.deltas import CallArguments, CallStart, Delta

_NAMES = frozenset({"name", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"


class _At(Enum):
    OPEN = "open"
    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    NEXT = "next"
    DONE = "done"
    FAILED = "failed"


class ValueScanner:
    """Finds where a JSON value ends, a character at a time. Does not check what is inside."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""

    @property
    def kind(self) -> str:
        """The value's first character; empty before it came."""
        return self._kind

    def take(self, char: str) -> bool | None:
        """None: the value goes on and holds `char`. True: it ends with `char`. False: it ended before `char`."""
        if not self._kind:
            self._kind = char
        if self._in_string:
            return self._take_in_string(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return False
            self._depth -= 1
            return True if self._depth == 0 else None
        elif self._depth == 0 and (char == "," or char in _SPACE):
            return False
        return None

    def _take_in_string(self, char: str) -> bool | None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True if self._depth == 0 else None
        return None


class CallScanner:
    """One call object. Feed it from its `{`; `done` after its `}`, `failed` where it is no call.

    `names`, where given, are the only names that make it a call (a bare JSON answer is no call).
    """

    def __init__(self, number: int, names: frozenset[str] | None = None) -> None:
        self.number = number
        self._names = names
        self._at = _At.OPEN
        self._key = ""
        self._value: list[str] = []
        self._scanner = ValueScanner()
        self._name = ""
        self._early = ""
        self.started = False
        self._argued = False

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def feed(self, text: str, out: list[Delta]) -> int:
        """Takes characters until the call is done or has failed; returns how many were taken."""
        streamed: list[str] = []
        for i, char in enumerate(text):
            again = True
            while again:
                again = self._step(char, streamed, out)
            if self._at in (_At.DONE, _At.FAILED):
                self._flush(streamed, out)
                return i + 1 if self._at is _At.DONE else i
        self._flush(streamed, out)
        return len(text)

    def _flush(self, streamed: list[str], out: list[Delta]) -> None:
        if streamed:
            out.append(CallArguments(self.number, "".join(streamed)))
            streamed.clear()

    def _step(self, char: str, streamed: list[str], out: list[Delta]) -> bool:
        """One character; True when it must be looked at again in the new state."""
        if self._at is _At.VALUE and self._scanner.kind:
            return self._in_value(char, streamed, out)
        if self._at is _At.KEY and self._scanner.kind:
            self._value.append(char)
            if self._scanner.take(char):
                self._key = _text(self._value)
                self._at = _At.COLON
            return False
        if char in _SPACE:
            return False
        if self._at in (_At.KEY, _At.VALUE) and (char == '"' if self._at is _At.KEY else char not in ",:}]"):
            self._value, self._scanner = [], ValueScanner()
            if self._at is _At.VALUE:
                self._begin_value(out)
                return self._in_value(char, streamed, out)
            self._value.append(char)
            self._scanner.take(char)
            return False
        self._punctuate(char, streamed, out)
        return False

    def _punctuate(self, char: str, streamed: list[str], out: list[Delta]) -> None:
        moves = {
            (_At.OPEN, "{"): _At.KEY,
            (_At.COLON, ":"): _At.VALUE,
            (_At.NEXT, ","): _At.KEY,
            (_At.NEXT, "}"): _At.DONE,
            (_At.KEY, "}"): _At.DONE,
        }
        self._at = moves.get((self._at, char), _At.FAILED)
        self._scanner = ValueScanner()
        if self._at is _At.DONE:
            self._flush(streamed, out)
            self._end(out)

    def _begin_value(self, out: list[Delta]) -> None:
        if self._key in _ARGUMENTS and self._name:
            self._start(out)

    def _in_value(self, char: str, streamed: list[str], out: list[Delta]) -> bool:
        ended = self._scanner.take(char)
        if ended is not False:
            live = self._key in _ARGUMENTS and self.started and self._scanner.kind == "{" and not self._argued
            (streamed if live else self._value).append(char)
        if ended is None:
            return False
        self._at = _At.NEXT
        self._end_value(out, streamed)
        return ended is False

    def _end_value(self, out: list[Delta], streamed: list[str]) -> None:
        kind = self._scanner.kind
        if self._key in _NAMES and kind == '"' and not self.started:
            self._name = _text(self._value)
            if self._names is not None and self._name not in self._names:
                self._at = _At.FAILED
            elif self._early:
                self._start(out)
                self._argue(out, self._early)
        elif self._key in _ARGUMENTS and not self._argued:
            if self.started and kind == "{":
                self._argued = True
                self._flush(streamed, out)
                return
            raw = "".join(self._value)
            text = _text(self._value) if kind == '"' else "{}" if raw == "null" else raw
            if self.started:
                self._argue(out, text)
            else:
                self._early = text

    def _start(self, out: list[Delta]) -> None:
        if not self.started:
            self.started = True
            out.append(CallStart(self.number, self._name))

    def _argue(self, out: list[Delta], text: str) -> None:
        self._argued = True
        out.append(CallArguments(self.number, text))

    def _end(self, out: list[Delta]) -> None:
        if not self._name:
            self._at = _At.FAILED
            return
        self._start(out)
        if not self._argued:
            self._argue(out, "{}")


def _text(raw: list[str]) -> str:
    """The string that JSON text stands for; the text between the quotes where it is damaged."""
    text = "".join(raw)
    try:
        return msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=str)
    except (msgspec.DecodeError, UnicodeError):
        return text.strip('"')
