"""The grammar of a whole answer: a JSON value, or tool calls in the model's own markup, after its reasoning if any.

Not here: the parsers that read the same markup back (`output`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertd.server.grammar.gbnf import COMPACT, any_until, literal, spell, value_literal
from expertd.server.grammar.schema import SchemaRules
from expertd.server.output.formats import ChatFormat, ToolStyle
from expertd.server.output.harmony import CHANNEL, MESSAGE, START

_LINE = "\n"
_ANALYSIS = (
    f'({literal(CHANNEL + "analysis" + MESSAGE)} ([^<] | "<" [^|])* {literal("<|end|>" + START + "assistant")})?'
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def json_answer(
    schema: object, spoken: ChatFormat, prompt: str, *, param: str, tools: Sequence[Tool] = (), several: bool = True
) -> str:
    """A grammar for an answer that is one JSON value, or calls of `tools` instead. Raises RequestError."""
    rules = SchemaRules(param)
    value = rules.add_schema(schema, "answer")
    if spoken.style is ToolStyle.HARMONY:
        value = f'{literal(CHANNEL + "final")} (" "? {literal("<|constrain|>json")})? {literal(MESSAGE)} {value}'
    if not tools:
        return _answer(rules, spoken, prompt, value)
    return _answer(rules, spoken, prompt, f"({value} | {_calls(rules, tools, spoken, several=several)})", compact=True)


def call_answer(tools: Sequence[Tool], spoken: ChatFormat, prompt: str, *, several: bool) -> str:
    """A grammar for an answer that calls one of `tools`, or several times. Raises RequestError."""
    rules = SchemaRules("tools")
    return _answer(rules, spoken, prompt, _calls(rules, tools, spoken, several=several), compact=True)


def _answer(rules: SchemaRules, spoken: ChatFormat, prompt: str, body: str, *, compact: bool = False) -> str:
    """The whole grammar: what may be thought first, then `body`."""
    first = _ANALYSIS if spoken.style is ToolStyle.HARMONY else _thinking(spoken, prompt)
    return spell({"root": f"{first} {body}".strip(), **rules.rules, **(COMPACT if compact else {})})


def _calls(rules: SchemaRules, tools: Sequence[Tool], spoken: ChatFormat, *, several: bool) -> str:
    shape = _SHAPES[spoken.style]
    rules.rules["one-call"] = " | ".join([shape(rules, tool, i) for i, tool in enumerate(tools)])
    if spoken.style is ToolStyle.HARMONY:
        return "one-call"
    before, between, after = _BRACKETS[spoken.style]
    more = f" ({between} one-call)*" if several else ""
    return f"{before} one-call{more} {after}".strip()


def _thinking(spoken: ChatFormat, prompt: str) -> str:
    """What a reasoning model may say first."""
    opened = spoken.opened(prompt)
    if not opened and not spoken.thinks:
        return ""
    rest = f"{any_until(spoken.think[1])} [\\n]{{0,2}}"
    return rest if opened else f"({literal(spoken.think[0])} {rest})?"


def _arguments(rules: SchemaRules, tool: Tool, number: int) -> str:
    return rules.add_schema(tool.parameters or {"type": "object"}, f"call-{number}")


def _object(rules: SchemaRules, tool: Tool, number: int, word: str) -> str:
    arguments = _arguments(rules, tool, number)
    return (
        f'"{{" ws {value_literal("name")} ws ":" ws {value_literal(tool.name)} ws "," ws '
        f'{value_literal(word)} ws ":" ws {arguments} ws "}}"'
    )


def _hermes(rules: SchemaRules, tool: Tool, number: int) -> str:
    call = _object(rules, tool, number, "arguments")
    return f"{literal('<tool_call>' + _LINE)} {call} {literal(_LINE + '</tool_call>')}"


def _mistral(rules: SchemaRules, tool: Tool, number: int) -> str:
    return _object(rules, tool, number, "arguments")


def _llama3(rules: SchemaRules, tool: Tool, number: int) -> str:
    return _object(rules, tool, number, "parameters")


def _tagged(rules: SchemaRules, tool: Tool, number: int) -> str:
    properties = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    parts = [literal(f"<tool_call>\n<function={tool.name}>\n")]
    for key, schema in properties.items():
        is_text = isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
        value = '([^<] | "<" [^/])*' if is_text else _plain(rules, schema, f"call-{number}-{key}")
        pair = f"{literal(f'<parameter={key}>{_LINE}')} {value} {literal(f'{_LINE}</parameter>{_LINE}')}"
        parts.append(pair if key in required else f"({pair})?")
    return " ".join([*parts, literal("</function>\n</tool_call>")])


def _plain(rules: SchemaRules, schema: Any, name: str) -> str:
    """A value between tags: strings without quotes where they are listed, else JSON."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return "(" + " | ".join(literal(v) for v in values) + ")"
    return rules.add_schema(schema, name)


def _harmony(rules: SchemaRules, tool: Tool, number: int) -> str:
    head = literal(f"{CHANNEL}commentary to=functions.{tool.name} ")
    return f"{head} {literal('<|constrain|>json' + MESSAGE)} {_arguments(rules, tool, number)}"


_SHAPES = {
    ToolStyle.HERMES: _hermes,
    ToolStyle.TAGGED: _tagged,
    ToolStyle.MISTRAL: _mistral,
    ToolStyle.LLAMA3: _llama3,
    ToolStyle.HARMONY: _harmony,
}
_BRACKETS = {
    ToolStyle.HERMES: ("", literal(_LINE), ""),
    ToolStyle.TAGGED: ("", literal(_LINE), ""),
    ToolStyle.MISTRAL: (f'{literal("[TOOL_CALLS]")} "["', 'ws "," ws', '"]"'),
    ToolStyle.LLAMA3: ("", '"; "', ""),
}
