"""Bodies of `/v1/chat/completions`, `/v1/completions`, and of `/apply-template`, which takes the former."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from expertd.server.bodies.sampling import SamplingFields

Alternatives = Annotated[int, Meta(ge=0, le=128)]


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text can be read."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x20<>\"{}]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    name: str | None = None
    schema_: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = None
    """llama-server's place for the schema of a json_object."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class Common(SamplingFields, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Alternatives | None = None
    return_progress: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Common, kw_only=True):
    """`/v1/chat/completions`, and `/apply-template`, which needs the first half."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: Annotated[list[ToolSpec], Meta(max_length=512)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None


class CompletionBody(Common, kw_only=True):
    """`/v1/completions`. A prompt is text or token ids; a list of one prompt is that prompt."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | bool | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Alternatives | None = None
    suffix: str | None = None
