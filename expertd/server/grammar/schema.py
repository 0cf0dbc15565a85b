"""JSON schema to GBNF: what the sampler can enforce of a schema.

Enforced: type, properties, required, additionalProperties, items, prefixItems, minItems, maxItems, enum, const, anyOf,
oneOf, allOf (objects merged), local $ref (recursive too), minLength, maxLength, pattern, the formats date, time,
date-time and uuid, and bounds of small integer ranges. The rest (not, if, dependentSchemas, uniqueItems ...) is not
enforced. Properties come in the schema's order, required ones first. Remote references are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expertd.errors import RequestError
from expertd.server.grammar.gbnf import JSON_RULES, MAX_REPEAT, repeat, spell, value_literal
from expertd.server.grammar.pattern import PatternError, pattern_rule

_MAX_DEPTH = 64
_MAX_RULES = 4000
_MAX_ENUMERATED = 256
_FORMATS = {"date": "date", "time": "time", "date-time": 'date "T" time', "uuid": "uuid"}


class SchemaRules:
    """Rules of one grammar, into which several schemas may be turned. `param` names the request's field in errors."""

    def __init__(self, param: str) -> None:
        self.rules: dict[str, str] = {}
        self._param = param
        self._refs: dict[tuple[int, str], str] = {}
        self._root: Mapping[str, Any] = {}
        self._depth = 0

    def add_schema(self, schema: object, name: str) -> str:
        """The name of the rule that holds a value of `schema`. Raises RequestError."""
        self._root = schema if isinstance(schema, Mapping) else {}
        return self._rule(name, self._visit(schema, name))

    def fail(self, why: str) -> RequestError:
        return RequestError(f"the JSON schema cannot be enforced: {why}", param=self._param)

    def _rule(self, name: str, body: str) -> str:
        """A rule with this body, under this name or one like it."""
        if len(self.rules) >= _MAX_RULES:
            raise self.fail(f"it needs more than {_MAX_RULES} rules")
        clean = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:64] or "r"
        unique, n = clean, 0
        while unique in JSON_RULES or unique == "root" or self.rules.get(unique, body) != body:
            n += 1
            unique = f"{clean}-{n}"
        self.rules[unique] = body
        return unique

    def _visit(self, schema: object, name: str) -> str:
        """The expression of a value of `schema`."""
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            raise self.fail(f"{name} is no schema")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.fail("it is nested too deeply")
        try:
            body = self._combined(schema, name) or self._typed(schema, name)
        finally:
            self._depth -= 1
        return f"({body} | null)" if schema.get("nullable") is True else body

    def _combined(self, schema: Mapping[str, Any], name: str) -> str:
        """References, alternatives and constants; empty where there are none."""
        if isinstance(ref := schema.get("$ref"), str):
            return self._reference(ref)
        if "const" in schema:
            return value_literal(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return "(" + " | ".join(value_literal(v) for v in values) + ")"
        if isinstance(parts := schema.get("allOf"), list) and parts:
            base = {k: v for k, v in schema.items() if k != "allOf"}
            return self._visit(self._merged([base, *parts]), name)
        for word in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(word), list) and parts:
                base = {k: v for k, v in schema.items() if k != word and k != "description"}
                shared = base if base.keys() & {"properties", "required"} else None
                alternatives = [self._merged([shared, p]) if shared and isinstance(p, Mapping) else p for p in parts]
                return self._alternatives(alternatives, name)
        if isinstance(kinds := schema.get("type"), list) and kinds:
            return self._alternatives([{**schema, "type": kind} for kind in kinds], name)
        return ""

    def _alternatives(self, schemas: list[Any], name: str) -> str:
        visited = [self._rule(f"{name}-{i}", self._visit(s, f"{name}-{i}")) for i, s in enumerate(schemas)]
        return "(" + " | ".join(visited) + ")"

    def _reference(self, ref: str) -> str:
        key = (id(self._root), ref)
        if key not in self._refs:
            target = self._target(ref)
            name = f"ref-{len(self._refs)}-{ref.rsplit('/', 1)[-1]}"
            clean = self._rule(name, f"never-{len(self._refs)}")
            self._refs[key] = clean
            self.rules[clean] = self._visit(target, name)
        return self._refs[key]

    def _target(self, ref: str) -> object:
        if not ref.startswith("#"):
            raise self.fail(f"{ref} is not in it (only local references are followed)")
        target: Any = self._root
        for step in ref[1:].split("/")[1:]:
            word = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and word in target:
                target = target[word]
            elif isinstance(target, list) and word.isdecimal() and int(word) < len(target):
                target = target[int(word)]
            else:
                raise self.fail(f"{ref} leads nowhere")
        return target

    def _merged(self, schemas: list[Any]) -> dict[str, Any]:
        """One object schema that asks for what all of them ask."""
        out: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: list[Any] = []
        for schema in schemas:
            seen = set()
            while isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
                if ref in seen:
                    raise self.fail(f"{ref} refers to itself")
                seen.add(ref)
                schema = self._target(ref)
            if not isinstance(schema, Mapping):
                continue
            out |= schema
            properties |= schema["properties"] if isinstance(schema.get("properties"), Mapping) else {}
            required += schema["required"] if isinstance(schema.get("required"), list) else []
        if properties:
            out["properties"] = properties
        if required:
            out["required"] = required
        return out

    def _typed(self, schema: Mapping[str, Any], name: str) -> str:
        kind = schema.get("type")
        if kind is None:
            kind = _implied(schema)
        match kind:
            case "object":
                return self._object(schema, name)
            case "array":
                return self._array(schema, name)
            case "string":
                return self._string(schema)
            case "integer":
                return _integer(schema)
            case "number" | "boolean" | "null" | "value":
                return str(kind)
        raise self.fail(f"{kind!r} is no type")

    def _object(self, schema: Mapping[str, Any], name: str) -> str:
        properties, extra = schema.get("properties"), schema.get("additionalProperties")
        if not isinstance(properties, Mapping) or not properties:
            if not isinstance(extra, Mapping):
                return '"{" ws "}"' if extra is False else "object"
            pair = self._rule(f"{name}-pair", f'string ws ":" ws {self._visit(extra, f"{name}-value")}')
            return f'"{{" ws ({pair} (ws "," ws {pair})* ws)? "}}"'
        wanted = schema.get("required")
        required = set(map(str, wanted)) if isinstance(wanted, list) else set()
        pairs = {key: self._pair(key, value, name) for key, value in properties.items()}
        first = [pairs[k] for k in pairs if k in required]
        rest = [pairs[k] for k in pairs if k not in required]
        if extra is True or isinstance(extra, Mapping):
            extra_pair = self._rule(f"{name}-extra", f'string ws ":" ws {self._visit(extra, f"{name}-extra-value")}')
            rest.append(self._rule(f"{name}-extras", f'{extra_pair} (ws "," ws {extra_pair})*'))
        return f'"{{" ws {self._members(first, rest, name)} "}}"'

    def _pair(self, key: str, schema: object, name: str) -> str:
        value = self._visit(schema, f"{name}-{key}")
        return self._rule(f"{name}-{key}-kv", f'{value_literal(key)} ws ":" ws {value}')

    def _members(self, first: list[str], rest: list[str], name: str) -> str:
        """Required pairs, then each optional one or not; the comma stands before every pair but the first."""
        follow = ""
        alternatives: list[str] = []
        for i in range(len(rest) - 1, -1, -1):
            alternatives.insert(0, f"{rest[i]} {follow}".rstrip())
            follow = self._rule(f"{name}-rest-{i}", f'(ws "," ws {rest[i]})? {follow}'.rstrip())
        if first:
            return ' ws "," ws '.join(first) + f" {follow} ws"
        return "((" + " | ".join(alternatives) + ") ws)?"

    def _array(self, schema: Mapping[str, Any], name: str) -> str:
        prefix = schema.get("prefixItems", schema.get("items"))
        if isinstance(prefix, list):
            visited = [self._visit(s, f"{name}-{i}") for i, s in enumerate(prefix)]
            return '"[" ws ' + ' ws "," ws '.join(visited) + ' ws "]"'
        item = self._rule(f"{name}-item", self._visit(schema.get("items", True), f"{name}-item"))
        low, high = self._bounds(schema, "minItems", "maxItems")
        if high == 0:
            return '"[" ws "]"'
        more = repeat(f'(ws "," ws {item})', max(0, low - 1), None if high is None else high - 1)
        inner = f"{item} {more} ws"
        return f'"[" ws {inner} "]"' if low else f'"[" ws ({inner})? "]"'

    def _bounds(self, schema: Mapping[str, Any], lowest: str, highest: str) -> tuple[int, int | None]:
        low, high = schema.get(lowest, 0), schema.get(highest)
        if not _is_count(low) or not (high is None or _is_count(high)):
            raise self.fail(f"{lowest} and {highest} are counts")
        if low > MAX_REPEAT:
            raise self.fail(f"{lowest} may be at most {MAX_REPEAT}")
        if high is not None and high < low:
            raise self.fail(f"{highest} is below {lowest}")
        return low, high

    def _string(self, schema: Mapping[str, Any]) -> str:
        if isinstance(pattern := schema.get("pattern"), str):
            try:
                return f'"\\"" {pattern_rule(pattern)} "\\""'
            except PatternError as error:
                raise self.fail(str(error)) from error
        if (form := schema.get("format")) in _FORMATS:
            return f'"\\"" {_FORMATS[form]} "\\""'
        low, high = self._bounds(schema, "minLength", "maxLength")
        if low == 0 and high is None:
            return "string"
        return f'"\\"" {repeat("char", low, high)} "\\""'


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _implied(schema: Mapping[str, Any]) -> str:
    """The type that other words speak of; any value where none does."""
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        return "object"
    if schema.keys() & {"items", "prefixItems", "minItems", "maxItems"}:
        return "array"
    if schema.keys() & {"pattern", "minLength", "maxLength"}:
        return "string"
    return "value"


def _integer(schema: Mapping[str, Any]) -> str:
    """Small ranges are spelled out; of larger ones the sign is held."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int) and isinstance(high, int) and 0 <= high - low < _MAX_ENUMERATED:
        return "(" + " | ".join(f'"{n}"' for n in range(low, high + 1)) + ")"
    if isinstance(low, (int, float)) and low >= 1:
        return "([1-9] [0-9]{0,15})"
    if isinstance(low, (int, float)) and low >= 0:
        return '("0" | [1-9] [0-9]{0,15})'
    return "integer"


def schema_grammar(schema: object, param: str) -> str:
    """The grammar of one JSON value. Raises RequestError."""
    rules = SchemaRules(param)
    body = rules.add_schema(schema, "answer")
    return spell({"root": body, **rules.rules})
