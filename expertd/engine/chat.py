"""Renders a conversation with the model's own chat template, in a sandbox: templates come with untrusted files.

The template dialect is that of Hugging Face transformers: trimmed blocks, loop controls, `generation` tags ignored,
`raise_exception`, `strftime_now` and a tojson that keeps non-ASCII text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from expertd.errors import RequestError

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled template. `source` None is ChatML. Thread-safe once made."""

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        """Raises RequestError when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source or _CHATML
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(self.source)
        except TemplateError as error:
            raise RequestError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises RequestError with the template's own message when it refuses the messages."""
        names: dict[str, Any] = {**self._tokens, **(extra or {})}
        names.update(messages=list(messages), tools=list(tools) if tools else None)
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(names)
        except RequestError:
            raise
        except Exception as error:  # a template is a program: whatever it raises is the request's fault
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages", hint="see the model's card"
            ) from error


def _raise(message: str) -> None:
    raise RequestError(f"the chat template says: {message}", param="messages")


def _tojson(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
