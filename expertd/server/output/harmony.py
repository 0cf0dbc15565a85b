"""gpt-oss's harmony: channels within one answer. analysis is reasoning, final is content, commentary to a function is
a tool call.

The prompt ends with `<|start|>assistant`, so the answer begins within a header. Only what is between `<|message|>` and
the end of a message is ever shown.
"""

from __future__ import annotations

import re

from expertd.server.output.deltas import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    first_marker,
    held_back,
)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
_ALL = (*_ENDS, MESSAGE, "<|constrain|>", "<|endoftext|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADERS = (CHANNEL, START, MESSAGE, "to=")


class HarmonyParser:
    """Content, reasoning and calls. Where `with_calls` is False a message to a tool is reasoning."""

    def __init__(self, *, with_calls: bool = True, with_reasoning: bool = True) -> None:
        self._with_calls, self._with_reasoning = with_calls, with_reasoning
        self._held = ""
        self._in_header = True
        self._first = True
        self._kind = ""
        self._said: set[str] = set()
        self._break = False
        self._calls = 0
        self._argued = True

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        self._held += text
        while self._header(out) if self._in_header else self._message(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if not self._in_header:
            self._say(self._held, out)
            self._end_message(out)
        elif self._first and "<|" not in self._held and not self._held.lstrip().startswith("<"):
            self._open(CHANNEL + "final", out)
            self._say(self._held, out)
        self._held = ""
        return out

    def _header(self, out: list[Delta]) -> bool:
        start = self._held.lstrip()
        if self._first and start and not any(h.startswith(start[: len(h)]) for h in _HEADERS):
            self._open(CHANNEL + "final", out)  # no harmony at all: a prompt with its header complete
            return True
        at = self._held.find(MESSAGE)
        if at >= 0:
            self._open(self._held[:at], out)
            self._held = self._held[at + len(MESSAGE) :]
            return True
        return False

    def _open(self, header: str, out: list[Delta]) -> None:
        self._in_header = self._first = False
        channel = header.rpartition(CHANNEL)[2].split("<|")[0].split()
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._with_calls:
            self._kind, self._argued = "call", False
            out.append(CallStart(self._calls, recipient[1].removeprefix("functions.")))
        elif recipient is not None or (channel and channel[0] == "analysis"):
            self._kind = "reasoning" if self._with_reasoning else "content"
        else:
            self._kind = "content"
        self._break = self._kind in self._said

    def _message(self, out: list[Delta]) -> bool:
        at, marker = first_marker(self._held, _ALL)
        cut = at if at >= 0 else len(self._held) - held_back(self._held, _ALL)
        self._say(self._held[:cut], out)
        if at < 0:
            self._held = self._held[cut:]
            return False
        if marker in _ENDS:
            self._end_message(out)
            self._in_header = True
        self._held = self._held[cut + (0 if marker in (START, CHANNEL) else len(marker)) :]
        return True

    def _say(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self._kind == "call":
            self._argued = True
            out.append(CallArguments(self._calls, text))
            return
        if self._break:
            text, self._break = "\n\n" + text, False
        self._said.add(self._kind)
        out.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

    def _end_message(self, out: list[Delta]) -> None:
        if self._kind != "call":
            return
        if not self._argued:
            out.append(CallArguments(self._calls, "{}"))
        self._calls, self._kind = self._calls + 1, ""
