"""Regular expressions as GBNF, for `pattern` in JSON schemas.

Python's own parser reads the expression; what a grammar cannot say (look-around, back references) is an error, greedy
and lazy are the same. The text stands inside a JSON string, so quotes and backslashes are matched escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from expertd.server.grammar.gbnf import MAX_REPEAT, char_class, json_literal, repeat

_CLASSES = {
    sre.CATEGORY_DIGIT: "0-9",
    sre.CATEGORY_WORD: "a-zA-Z0-9_",
    sre.CATEGORY_SPACE: " \\t",
}
_MAX_DEPTH = 32


class PatternError(ValueError):
    """The expression cannot be said in GBNF."""


def pattern_rule(pattern: str) -> str:
    """The GBNF expression of a string's inside. Unanchored ends match anything. Raises PatternError."""
    try:
        tree = list(parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"the pattern {pattern!r} does not parse: {error}") from error
    starts = bool(tree) and tree[0] == (sre.AT, sre.AT_BEGINNING)
    ends = bool(tree) and tree[-1] == (sre.AT, sre.AT_END)
    inner = tree[starts : len(tree) - ends]
    body = _sequence(inner, 0)
    return " ".join(p for p in ("" if starts else "char*", body, "" if ends else "char*") if p) or '""'


def _sequence(items: Iterable[tuple[Any, Any]], depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise PatternError("the pattern is nested too deeply")
    return " ".join(p for p in (_item(op, value, depth + 1) for op, value in items) if p)


def _item(op: Any, value: Any, depth: int) -> str:
    match op:
        case sre.LITERAL:
            return json_literal(chr(value))
        case sre.NOT_LITERAL:
            return char_class(f"{_class_char(value)}\\x00-\\x1F\\\\\\x22", negated=True)
        case sre.ANY:
            return "char"
        case sre.IN:
            return _class(value)
        case sre.BRANCH:
            return "(" + " | ".join(_sequence(branch, depth) or '""' for branch in value[1]) + ")"
        case sre.SUBPATTERN:
            return "(" + (_sequence(value[-1], depth) or '""') + ")"
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            low, high, inner = value
            if low > MAX_REPEAT:
                raise PatternError(f"a pattern may repeat at most {MAX_REPEAT} times")
            most = None if high is sre.MAXREPEAT else high
            return repeat("(" + (_sequence(inner, depth) or '""') + ")", low, most)
    raise PatternError(f"the pattern uses {str(op).lower()}, which a grammar cannot say")


def _class(items: Iterable[tuple[Any, Any]]) -> str:
    negated, parts = False, []
    for op, value in items:
        match op:
            case sre.NEGATE:
                negated = True
            case sre.LITERAL:
                parts.append(_class_char(value))
            case sre.RANGE:
                parts.append(f"{_class_char(value[0])}-{_class_char(value[1])}")
            case sre.CATEGORY if value in _CLASSES:
                parts.append(_CLASSES[value])
            case _:
                raise PatternError("the pattern uses a character class that a grammar cannot say")
    inside = "".join(parts)
    return char_class(inside + "\\x00-\\x1F\\\\\\x22", negated=True) if negated else char_class(inside)


def _class_char(code: int) -> str:
    return f"\\U{code:08X}" if code > 126 or chr(code) in '\\]["^-' or code < 32 else chr(code)
