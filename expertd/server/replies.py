"""Shapes of the answers, for the OpenAPI document. The tests hold real answers against them.

The renderers (`render`) and routes write the answers themselves; these say what clients may rely on.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    code: str | int | None = None
    param: str | None = None


class Error(msgspec.Struct, kw_only=True):
    """What every failed request gets."""

    error: ErrorBody


class Timings(msgspec.Struct, kw_only=True):
    """Tokens and milliseconds, as llama-server tells them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Receipt(msgspec.Struct, kw_only=True):
    """What the answer cost: expert requests and hits, bytes read, time waiting for the disk (null where the kernel
    does not account for it), major faults."""

    expert_requests: int
    expert_hits: int
    bytes_read: int
    io_wait_ms: float | None
    major_faults: int
    queue_ms: float
    first_token_ms: float


class Billed(msgspec.Struct, kw_only=True):
    """Every answer's last two fields."""

    timings: Timings
    expertd: Receipt


class TokenDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None = None


class ChatCompletion(Billed, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None = None


class Completion(Billed, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class ResponseObject(Billed, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class AnthropicMessage(Billed, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int
    owned_by: str
    meta: dict[str, Any]
    object: Literal["model"] = "model"


class Models(msgspec.Struct, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, kw_only=True):
    """Ids, or objects of id and piece where `with_pieces` was asked for."""

    tokens: list[int | dict[str, Any]]


class Text(msgspec.Struct, kw_only=True):
    content: str


class RenderedPrompt(msgspec.Struct, kw_only=True):
    prompt: str


class Props(msgspec.Struct, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    chat_template: str
    build_info: str


class Status(msgspec.Struct, kw_only=True):
    status: str
