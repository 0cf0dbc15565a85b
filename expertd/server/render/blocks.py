"""What the block-wise APIs share: an answer is a row of blocks (reasoning, text, call), one open at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from expertd.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning


class Open(NamedTuple):
    """A block begins. `kind` is reasoning, text or call; `name` is the call's."""

    number: int
    kind: str
    name: str


class More(NamedTuple):
    number: int
    kind: str
    text: str


class Close(NamedTuple):
    """A block ends; `text` is all of it."""

    number: int
    kind: str
    text: str


Step = Open | More | Close


class Blocks:
    """Turns deltas into steps. `close` ends the open block."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""
        self._call = -1
        self._parts: list[str] = []

    def add(self, deltas: Sequence[Delta]) -> list[Step]:
        out: list[Step] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    out += [*self._turn("text"), self._more(text)]
                case Reasoning(text):
                    out += [*self._turn("reasoning"), self._more(text)]
                case CallStart(number, name):
                    out += self.close()
                    self._call = number
                    out.append(self._open("call", name))
                case CallArguments(number, text):
                    if self._kind == "call" and number == self._call:
                        out.append(self._more(text))
        return out

    def close(self) -> list[Step]:
        if not self._kind:
            return []
        step = Close(self._index, self._kind, "".join(self._parts))
        self._kind, self._parts = "", []
        return [step]

    def _turn(self, kind: str) -> list[Step]:
        return [] if self._kind == kind else [*self.close(), self._open(kind, "")]

    def _open(self, kind: str, name: str) -> Open:
        self._index, self._kind = self._index + 1, kind
        return Open(self._index, kind, name)

    def _more(self, text: str) -> More:
        self._parts.append(text)
        return More(self._index, self._kind, text)
