"""Small words of GBNF: literals, classes, repetition, and the rules of JSON itself.

White space stands between tokens, never after the last: a complete value can only be followed by the end.
"""

from __future__ import annotations

import json

MAX_REPEAT = 1000
"""llama.cpp refuses grammars that repeat more often than twice this."""

JSON_RULES = {
    "ws": '| " " | "\\n" [ \\t]{0,20}',
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": '"-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "object": '"{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)* ws)? "}"',
    "array": '"[" ws (value (ws "," ws value)* ws)? "]"',
    "value": "object | array | string | number | boolean | null",
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
    '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "uuid": '[0-9a-fA-F]{8} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{12}',
}


def literal(text: str) -> str:
    """`text` to be matched as it is."""
    return '"' + "".join(_escaped(c) for c in text) + '"'


def json_literal(text: str) -> str:
    """`text` to be matched as it stands inside a JSON string."""
    return literal(json.dumps(text, ensure_ascii=False)[1:-1])


def value_literal(value: object) -> str:
    """A JSON value to be matched in its compact spelling."""
    return literal(json.dumps(value, ensure_ascii=False))


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\U{ord(char):08X}" if ord(char) < 32 or ord(char) == 127 else char


def char_class(inside: str, *, negated: bool = False) -> str:
    return f"[^{inside}]" if negated else f"[{inside}]"


def repeat(item: str, low: int, high: int | None) -> str:
    """`item` from `low` to `high` times; a `high` beyond what llama.cpp takes is none."""
    if high is not None and high > MAX_REPEAT:
        high = None
    if high == 0:
        return '""'
    match low, high:
        case 0, None:
            return f"{item}*"
        case 1, None:
            return f"{item}+"
        case 0, 1:
            return f"{item}?"
        case 1, 1:
            return item
        case _, None:
            return f"{item}{{{low},}}"
        case _:
            return f"{item}{{{low},{high}}}"


def any_until(end: str) -> str:
    """Any text up to and with `end`. Text that repeats the end's first two characters may not come before it."""
    first, second = _class_escape(end[0]), _class_escape(end[1])
    return f"([^{first}] | {literal(end[0])} [^{second}])* {literal(end)}"


def _class_escape(char: str) -> str:
    return "\\" + char if char in "[]\\" else char


COMPACT = {"ws": '" "?'}
"""White space where nobody reads it: small models otherwise wander off into new lines."""


def spell(rules: dict[str, str]) -> str:
    """The grammar's text, with those rules of JSON that it uses."""
    out = dict(rules)
    todo = list(rules.values())
    while todo:
        body = todo.pop()
        for name in set(_words(body)) & JSON_RULES.keys() - out.keys():
            out[name] = JSON_RULES[name]
            todo.append(JSON_RULES[name])
    return "\n".join(f"{name} ::= {body}" for name, body in out.items())


def _words(body: str) -> list[str]:
    """Words outside of literals and classes."""
    plain, quote, escaped = [], "", False
    for char in body:
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
            continue
        if char in '"[':
            quote = '"' if char == '"' else "]"
            plain.append(" ")
        else:
            plain.append(char if char.isalnum() or char == "-" else " ")
    return "".join(plain).split()
