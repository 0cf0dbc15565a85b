"""From a conversation to a prompt and its parser: what chat completions, responses and messages have in common.

1. Messages become what the template expects: text joined, calls with their arguments as objects.
2. Tools go to the template; where it knows none they are described in the system message.
3. The template renders; a last message of the assistant is continued instead of answered.
4. A forced call or a JSON answer becomes a grammar.
5. The text becomes tokens, with one BOS.

Not here: the shapes of the three APIs (`bodies`, `render`), running the request (`generation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from expertd.errors import NotReadyError, RequestError
from expertd.runtime.requests import Sampling
from expertd.server.contract import ModelInfo, Service
from expertd.server.grammar.frames import Tool, call_answer, json_answer
from expertd.server.output.deltas import Parser
from expertd.server.output.formats import ChatFormat, make_parser, read_format

spoken_by = lru_cache(maxsize=8)(read_format)
_HERMES_WORDS = (
    "You may call functions. Their signatures are within <tools></tools>:\n<tools>\n{}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat asks for, whatever API it came by. `messages` are as in OpenAI's chat completions, content as text.

    `choice` is none, auto, required or the name of a tool; `schema` asks for a JSON answer, and None for none;
    `schema_param` names the field it came in.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    schema: object = None
    schema_param: str = "response_format"
    template_extra: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    reasoning: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return () if self.choice == "none" else self.tools


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation ready to run."""

    text: str
    tokens: tuple[int, ...]
    sampling: Sampling
    special: bool
    parser: Parser


def loaded(service: Service) -> ModelInfo:
    """The model. Raises NotReadyError while there is none."""
    model = service.model
    if model is None:
        if service.state == "failed":
            raise NotReadyError(f"the model could not be loaded: {service.failure}")
        raise NotReadyError("the model is loading", hint="try again")
    return model


def prepare(service: Service, conversation: Conversation, sampling: Sampling) -> Prompt:
    """Renders, constrains and tokenizes; for a thread, as templates and long texts take their time.

    Raises RequestError for what the template, a schema or a tool choice cannot do, NotReadyError without a model.
    """
    model = loaded(service)
    spoken = spoken_by(model.chat_template)
    text = render(service, conversation, spoken)
    tools = _callable(conversation)
    sampling = _constrained(conversation, tools, spoken, text, sampling)
    special = spoken.special(tools=bool(tools))
    parser = make_parser(
        spoken, text, {t.name: t.parameters for t in tools}, reasoning=conversation.reasoning, special=special
    )
    return Prompt(text, tuple(tokens_of(service, model, text)), sampling, special, parser)


def tokens_of(service: Service, model: ModelInfo, text: str) -> list[int]:
    """Tokens of a rendered prompt. A template that wrote the BOS itself gets no second one."""
    has_bos = bool(model.bos) and text.startswith(model.bos)
    return service.tokenize(text, add_special=not has_bos, parse_special=True)


def render(service: Service, conversation: Conversation, spoken: ChatFormat) -> str:
    """The prompt's text. Raises RequestError with the template's own message."""
    messages = [_with_role(m, spoken) for m in conversation.messages]
    tools = [t.as_openai() for t in conversation.offered]
    if tools and not spoken.native_tools:
        messages, tools = _described(messages, tools), []
    tail = ""
    if (
        messages[-1]["role"] == "assistant"
        and not messages[-1].get("tool_calls")
        and conversation.add_generation_prompt
    ):
        tail = messages.pop()["content"]
        if not messages:
            raise RequestError("a conversation needs a message besides the assistant's", param="messages")

    def apply(given: list[dict[str, Any]]) -> str:
        return service.apply_template(
            given,
            tools=tools or None,
            add_generation_prompt=conversation.add_generation_prompt,
            extra=conversation.template_extra or None,
        )

    try:
        return apply(messages) + tail
    except RequestError:
        if not any(m.get("tool_calls") for m in messages):
            raise
        return apply([_with_text_arguments(m) for m in messages]) + tail


def _with_role(message: dict[str, Any], spoken: ChatFormat) -> dict[str, Any]:
    if message["role"] == "developer" and not spoken.has_developer:
        return {**message, "role": "system"}
    return dict(message)


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in words, for a template that knows none; what was called and answered in words, too."""
    words = _HERMES_WORDS.format("\n".join(msgspec.json.encode(t).decode() for t in tools))
    out = [_in_words(m) for m in messages]
    if out[0]["role"] == "system":
        out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{words}"}
        return out
    return [{"role": "system", "content": words}, *out]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        texts = [f"<tool_call>\n{msgspec.json.encode(c['function']).decode()}\n</tool_call>" for c in calls]
        return {"role": "assistant", "content": "\n".join(t for t in (message["content"], *texts) if t)}
    return message


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that put the arguments in as text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _callable(conversation: Conversation) -> Sequence[Tool]:
    """The tools that this answer may call. Raises RequestError when the choice names none of them."""
    if conversation.choice in ("none", "auto", "required"):
        if conversation.choice == "required" and not conversation.tools:
            raise RequestError("a call is required and there are no tools", param="tool_choice")
        return conversation.offered
    named = [t for t in conversation.tools if t.name == conversation.choice]
    if not named:
        raise RequestError(f"{conversation.choice!r} is none of the tools", param="tool_choice")
    return named


def _constrained(
    conversation: Conversation, tools: Sequence[Tool], spoken: ChatFormat, text: str, sampling: Sampling
) -> Sampling:
    """The sampling with the grammar that the conversation asks for; the request's own grammar excludes it."""
    forced = conversation.choice not in ("none", "auto")
    if not forced and conversation.schema is None:
        return sampling
    if sampling.grammar:
        raise RequestError("a grammar excludes a JSON answer and a forced call", param="grammar")
    if forced:
        several = conversation.parallel and conversation.choice == "required"
        grammar = call_answer(tools, spoken, text, several=several)
    else:
        grammar = json_answer(
            conversation.schema,
            spoken,
            text,
            param=conversation.schema_param,
            tools=tools,
            several=conversation.parallel,
        )
    return replace(sampling, grammar=grammar, grammar_triggers=())
