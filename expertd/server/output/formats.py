"""Which markup a model speaks, read from its chat template, and the parser for one answer.

1. harmony, where the template has `<|channel|>`
2. Mistral's `[TOOL_CALLS]`
3. tagged calls (`<tool_call>`, `<function=`)
4. Llama 3's bare JSON, where the template speaks of `ipython` or `python_tag`
5. none: the tools are described in words, in Hermes' form (see `chat`)

Reasoning tags are looked for in every answer but harmony's: a model may think although its template says nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from expertd.server.output.deltas import Parser, Plain
from expertd.server.output.harmony import HarmonyParser
from expertd.server.output.hermes import HermesParser
from expertd.server.output.llama3 import Llama3Parser
from expertd.server.output.mistral import MistralParser
from expertd.server.output.think import TAGS, ThinkParser


class ToolStyle(Enum):
    HERMES = "hermes"
    TAGGED = "tagged"
    MISTRAL = "mistral"
    LLAMA3 = "llama3"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What a template tells. `native_tools`: it renders tools by itself."""

    style: ToolStyle
    native_tools: bool
    think: tuple[str, str]
    thinks: bool
    """The template itself speaks of the reasoning tags."""
    has_developer: bool

    def opened(self, prompt: str) -> bool:
        """Whether the prompt ends within the reasoning."""
        return prompt.rstrip().endswith(self.think[0])

    def special(self, *, tools: bool) -> bool:
        """Whether control tokens must be in the text for the parser to see them."""
        return (
            self.style is ToolStyle.HARMONY
            or (tools and self.style in (ToolStyle.MISTRAL, ToolStyle.LLAMA3))
            or (self.thinks and self.think[0][0] != "<")
            or (self.thinks and self.think[0].startswith("<|"))
        )


def read_format(template: str | None) -> ChatFormat:
    """The format that a chat template speaks."""
    text = template or ""
    think = next((tags for tags in TAGS if tags[1] in text or tags[0] in text), None)
    return ChatFormat(
        style=_style(text),
        native_tools="tools" in text,
        think=think or TAGS[0],
        thinks=think is not None,
        has_developer="developer" in text,
    )


def _style(text: str) -> ToolStyle:
    if "<|channel|>" in text:
        return ToolStyle.HARMONY
    if "[TOOL_CALLS]" in text:
        return ToolStyle.MISTRAL
    if "<function=" in text and "<parameter=" in text:
        return ToolStyle.TAGGED
    if "<tool_call>" not in text and ("ipython" in text or "python_tag" in text):
        return ToolStyle.LLAMA3
    return ToolStyle.HERMES


def make_parser(
    spoken: ChatFormat, prompt: str, tools: Mapping[str, Mapping[str, Any]], *, reasoning: bool, special: bool
) -> Parser:
    """The parser of one answer. `tools` maps names to parameter schemas and is empty where no call may come;
    `reasoning` False leaves the tags in the content; `special` tells that control tokens are in the text."""
    if spoken.style is ToolStyle.HARMONY:
        return HarmonyParser(with_calls=bool(tools), with_reasoning=reasoning)
    rest = _tool_parser(spoken.style, tools, special=special)
    if not reasoning:
        return rest
    return ThinkParser(rest, spoken.think, opened=spoken.opened(prompt))


def _tool_parser(style: ToolStyle, tools: Mapping[str, Mapping[str, Any]], *, special: bool) -> Parser:
    if not tools:
        return MistralParser() if special and style is ToolStyle.MISTRAL else Plain()
    if style is ToolStyle.MISTRAL:
        return MistralParser()
    if style is ToolStyle.LLAMA3:
        return Llama3Parser(frozenset(tools))
    return HermesParser(tools, bare=style is ToolStyle.TAGGED)
