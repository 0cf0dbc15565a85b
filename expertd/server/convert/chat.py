"""OpenAI's chat messages, tools and formats as a `Conversation`; also the checks that completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from expertd.errors import RequestError
from expertd.server.bodies.openai import (
    ChatBody,
    Common,
    Message,
    NamedTool,
    Part,
    ResponseFormat,
    ToolCall,
    ToolSpec,
)
from expertd.server.chat import Conversation
from expertd.server.grammar.frames import Tool

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def conversation_of(body: ChatBody) -> Conversation:
    """Raises RequestError for parts that are no text, several answers, and tool choices without tools."""
    one_answer(body)
    choice = body.tool_choice or "auto"
    schema, param = wanted_schema(body)
    return Conversation(
        messages=messages_of(body.messages),
        tools=tools_of(body.tools),
        choice=choice.function.name if isinstance(choice, NamedTool) else choice,
        parallel=body.parallel_tool_calls is not False,
        schema=schema,
        schema_param=param,
        template_extra=template_extra(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        reasoning=body.reasoning_format != "none",
    )


def one_answer(body: Common) -> None:
    """Raises RequestError when more than one answer is asked for."""
    if body.n is not None and body.n != 1:
        raise RequestError("n must be 1: one answer a request", param="n", hint="send several requests")


def template_extra(body: ChatBody) -> dict[str, Any]:
    """Names for the template besides the messages."""
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    for name in ("messages", "tools", "add_generation_prompt"):
        extra.pop(name, None)
    return extra


def tools_of(specs: Sequence[ToolSpec] | None) -> tuple[Tool, ...]:
    return tuple(
        Tool(s.function.name, s.function.description or "", s.function.parameters or {"type": "object"})
        for s in specs or ()
    )


def messages_of(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as templates expect them: content always text, arguments always objects."""
    out = []
    for i, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": text_of(message.content, f"messages[{i}].content")}
        if message.tool_calls:
            one["tool_calls"] = [_call(c) for c in message.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                one[name] = value
        out.append(one)
    return tuple(out)


def text_of(content: str | list[Part] | None, where: str) -> str:
    """The text of a content. Raises RequestError for a part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{where} has a part of type {part.type[:64]!r}: this model reads text alone", param="messages"
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    return {"id": call.id or "", "type": "function", "function": function}


def arguments_of(given: str | dict[str, Any] | None) -> Any:
    """A call's arguments as an object; what is no JSON stays text."""
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError:
        return given


def wanted_schema(body: Common) -> tuple[object, str]:
    """The schema of a JSON answer and the field it stands in; (None, "") where text is wanted."""
    if body.json_schema is not None:
        return body.json_schema, "json_schema"
    form = body.response_format
    if form is None or form.type == "text":
        return None, ""
    return _schema_of(form), "response_format"


def _schema_of(form: ResponseFormat) -> object:
    if form.json_schema is not None and form.json_schema.schema_ is not None:
        return form.json_schema.schema_
    if form.schema_ is not None:
        return form.schema_
    if form.type == "json_schema":
        raise RequestError("json_schema needs a schema", param="response_format")
    return {"type": "object"}
