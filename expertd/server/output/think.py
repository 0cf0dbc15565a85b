"""Reasoning between tags: `<think> ... </think>` and its kin, at the beginning of an answer.

Not here: harmony's channels (`harmony`).
"""

from __future__ import annotations

from enum import Enum

from expertd.server.output.deltas import Delta, Parser, Reasoning, held_back

TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


class _State(Enum):
    BEGIN = "begin"
    THINKING = "thinking"
    AFTER = "after"
    CONTENT = "content"


class ThinkParser:
    """Splits reasoning off and hands the rest to `rest`.

    `tags` is the pair in use; `opened` tells that the prompt ended within the reasoning. White space at the edges of
    the reasoning and before the content after it belongs to the markup and is dropped.
    """

    def __init__(self, rest: Parser, tags: tuple[str, str] = TAGS[0], *, opened: bool = False) -> None:
        self._rest = rest
        self._open, self._close = tags
        self._state = _State.THINKING if opened else _State.BEGIN
        self._held = ""
        self._said = False

    def feed(self, text: str) -> list[Delta]:
        if self._state is _State.CONTENT:
            return self._rest.feed(text)
        out: list[Delta] = []
        self._held += text
        if self._state is _State.BEGIN:
            self._begin(out)
        if self._state is _State.THINKING:
            self._think(out)
        if self._state is _State.AFTER:
            self._after(out)
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if self._state is _State.BEGIN:
            out += self._rest.feed(self._held)
        elif self._state is _State.THINKING:
            self._say(out, self._held.rstrip())
        self._held = ""
        return out + self._rest.finish()

    def _begin(self, out: list[Delta]) -> None:
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._state, self._held = _State.THINKING, start[len(self._open) :]
        elif not self._open.startswith(start):
            self._state, held, self._held = _State.CONTENT, self._held, ""
            out += self._rest.feed(held)

    def _think(self, out: list[Delta]) -> None:
        if not self._said:
            self._held = self._held.lstrip()
        end = self._held.find(self._close)
        if end >= 0:
            self._say(out, self._held[:end].rstrip())
            self._state, self._held = _State.AFTER, self._held[end + len(self._close) :]
            return
        cut = len(self._held) - held_back(self._held, (self._close,))
        shown = self._held[:cut].rstrip()
        self._say(out, shown)
        self._held = self._held[len(shown) :]

    def _say(self, out: list[Delta], text: str) -> None:
        if text:
            self._said = True
            out.append(Reasoning(text))

    def _after(self, out: list[Delta]) -> None:
        rest = self._held.lstrip()
        self._held = ""
        if rest:
            self._state = _State.CONTENT
            out += self._rest.feed(rest)
