"""`/v1/messages` as a `Conversation`."""

from __future__ import annotations

from typing import Any

from expertd.errors import RequestError
from expertd.server.bodies.anthropic import Block, MessagesBody, ToolChoice, Turn
from expertd.server.chat import Conversation
from expertd.server.grammar.frames import Tool

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation_of(body: MessagesBody) -> Conversation:
    """Raises RequestError for blocks that cannot be read."""
    choice = body.tool_choice or ToolChoice()
    if choice.type == "tool" and not choice.name:
        raise RequestError("a tool choice of type tool needs a name", param="tool_choice")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages[{i}]")
    return Conversation(
        messages=tuple(messages),
        tools=tuple(
            Tool(t.name, t.description or "", t.input_schema) for t in body.tools or () if t.input_schema is not None
        ),
        choice=choice.name or "" if choice.type == "tool" else _CHOICES[choice.type],
        parallel=not choice.disable_parallel_tool_use,
        template_extra=dict(body.chat_template_kwargs or {}),
    )


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    """One turn; results of tools become messages of their own, before the rest."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for block in turn.content:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.name or "", "arguments": block.input or {}}
                calls.append({"id": block.id or "", "type": "function", "function": function})
            case "tool_result":
                text = _text(block.content or "", where)
                results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id or ""})
            case other:
                raise RequestError(f"{where} has a block of type {other[:64]!r}: only text is read", param="messages")
    if results and not texts and not calls:
        return results
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message]


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise RequestError(f"{where} has a block of type {block.type[:64]!r}: only text is read", param="messages")
    return "\n".join(b.text or "" for b in content)
