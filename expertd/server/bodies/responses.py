"""Body of `/v1/responses`, OpenAI's newer API. Nothing is stored: a conversation is sent whole each time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from expertd.server.bodies.openai import Part
from expertd.server.bodies.sampling import SamplingFields, Tokens


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call, a call's output or earlier reasoning, by `type` (a message where there is none)."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    """A function; tools of other types are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatChoice(msgspec.Struct, kw_only=True):
    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """`/v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Tokens | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
