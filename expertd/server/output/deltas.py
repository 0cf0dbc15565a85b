"""What a parser says: pieces of content, of reasoning, and of tool calls.

Parsers are automata over the characters of the text. How the text is cut into pieces never changes what they say, only
when: what might be the beginning of a marker is held back until it is one or is not.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thinks aloud."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; `number` counts from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Raw text in, deltas out. After `finish` a parser is done."""

    def feed(self, text: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class Plain:
    """No markup: all is content."""

    def feed(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for n in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        tail = text[-n:]
        if any(m.startswith(tail) for m in markers):
            return n
    return 0


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """Where the first marker begins, and which it is; (-1, "") where there is none. The longest wins a tie."""
    best, found = -1, ""
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best < 0 or at < best or (at == best and len(marker) > len(found))):
            best, found = at, marker
    return best, found


def without(text: str, markers: tuple[str, ...]) -> str:
    """`text` with no marker left in it, not even one that appears when another is taken out."""
    at, marker = first_marker(text, markers)
    while at >= 0:
        text = text[:at] + text[at + len(marker) :]
        at, marker = first_marker(text, markers)
    return text
