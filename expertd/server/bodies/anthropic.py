"""Body of `/v1/messages`, Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from expertd.server.bodies.sampling import SamplingFields, Tokens


class Block(msgspec.Struct, kw_only=True):
    """A block of content: text, thinking, tool_use or tool_result; others cannot be read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(msgspec.Struct, kw_only=True):
    """A tool with its input's schema; tools that the API's owner runs have none and are ignored."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x20<>\"{}]+$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(SamplingFields, kw_only=True):
    """`/v1/messages`, and `/v1/messages/count_tokens`, which needs the first half."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Tokens | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
