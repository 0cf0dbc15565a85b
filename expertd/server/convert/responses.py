"""`/v1/responses` as a `Conversation`."""

from __future__ import annotations

from typing import Any

from expertd.errors import RequestError
from expertd.server.bodies.responses import FlatChoice, InputItem, ResponsesBody
from expertd.server.chat import Conversation
from expertd.server.convert.chat import arguments_of, text_of
from expertd.server.grammar.frames import Tool


def conversation_of(body: ResponsesBody) -> Conversation:
    """Raises RequestError for items and parts that cannot be read, and for a stored conversation."""
    if body.previous_response_id:
        raise RequestError(
            "responses are not stored", param="previous_response_id", hint="send the whole conversation as input"
        )
    choice = body.tool_choice or "auto"
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning.effort)
    return Conversation(
        messages=_messages(body),
        tools=tuple(
            Tool(t.name, t.description or "", t.parameters or {"type": "object"})
            for t in body.tools or ()
            if t.type == "function" and t.name
        ),
        choice=choice.name if isinstance(choice, FlatChoice) else choice,
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body),
        schema_param="text",
        template_extra=extra,
    )


def _schema(body: ResponsesBody) -> object:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise RequestError("json_schema needs a schema", param="text")
    return form.schema_ or {"type": "object"}


def _messages(body: ResponsesBody) -> tuple[dict[str, Any], ...]:
    out: list[dict[str, Any]] = []
    if body.instructions:
        out.append({"role": "system", "content": body.instructions})
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for i, item in enumerate(items):
        _add(out, item, f"input[{i}]")
    if not out:
        raise RequestError("the input holds no message", param="input")
    return tuple(out)


def _add(out: list[dict[str, Any]], item: InputItem, where: str) -> None:
    match item.type or "message":
        case "message":
            if not item.role:
                raise RequestError(f"{where} has no role", param="input")
            out.append({"role": item.role, "content": text_of(item.content, f"{where}.content")})
        case "function_call":
            call = {"name": item.name or "", "arguments": arguments_of(item.arguments)}
            if not (out and out[-1]["role"] == "assistant"):
                out.append({"role": "assistant", "content": ""})
            out[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id or "", "type": "function", "function": call}
            )
        case "function_call_output":
            text = text_of(item.output, f"{where}.output")
            out.append({"role": "tool", "content": text, "tool_call_id": item.call_id or ""})
        case "reasoning":
            pass
        case other:
            raise RequestError(f"{where} is of type {other[:64]!r}, which cannot be read", param="input")
