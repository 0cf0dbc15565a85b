"""JSON schemas and tool calls as grammars, held against llama.cpp's own grammar engine on the real vocabulary."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as L

from expertd.errors import RequestError
from expertd.server.grammar.frames import Tool, call_answer, json_answer
from expertd.server.grammar.schema import schema_grammar
from expertd.server.output.deltas import CallArguments, CallStart
from expertd.server.output.formats import make_parser, read_format
from tests.server.conftest import LiveServer

TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
Matches = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def matches(live: LiveServer) -> Matches:
    """Whether a grammar takes a text from beginning to end; AssertionError where the grammar does not parse."""
    model = live.service.session.model

    def allowed(grammar: Any, token: int) -> bool:
        one = np.array([(token, 1.0, 0.0)], TOKEN)
        pointer = one.ctypes.data_as(ctypes.POINTER(L.llama_token_data))
        array = L.llama_token_data_array(data=pointer, size=1, selected=-1, sorted=False)
        L.llama_sampler_apply(grammar, ctypes.byref(array))
        return bool(one["logit"][0] != -np.inf)

    def check(text: str, candidate: str) -> bool:
        grammar = L.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
        assert grammar, text
        try:
            for token in model.tokenize(candidate, add_special=False, parse_special=False):
                if not allowed(grammar, token):
                    return False
                L.llama_sampler_accept(grammar, token)
            return allowed(grammar, model.end_tokens[0])
        finally:
            L.llama_sampler_free(grammar)

    return check


OBJECT = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}, "required": ["b"]}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", '{"a": [null]}', '"x"'], ["", "{", "nul"]),
        ({}, ["true", "[]"], ["tru"]),
        ({"description": "anything"}, ["[1, 2]"], ["[1,"]),
        ({"type": "object"}, ["{}", '{"x": {"y": []}}'], ["[]", '{"x"}']),
        (OBJECT, ['{"b":"x"}', '{"b": "x", "a": -1, "c": [1]}', '{"b":"x","c":null}'], ['{"a":1}', '{"b":1}', "{}"]),
        ({"type": "object", "properties": {"a": True}}, ["{}", '{"a":1}'], ['{"b":1}']),
        ({"type": "object", "properties": {"a": True}, "additionalProperties": True},
         ['{"a":1,"z":2}', '{"z":2}'], ["[]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"k":1,"l":2}'], ['{"k":"v"}']),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"k":1}']),
        ({"enum": ["a\\b", 'say "hi"', 1, None, "new\nline"]},
         ['"a\\\\b"', '"say \\"hi\\""', "1", "null", '"new\\nline"'], ['"a"']),
        ({"const": {"k": [1]}}, ['{"k": [1]}'], ['{"k": [2]}']),
        ({"type": ["integer", "null"]}, ["5", "null"], ["true"]),
        ({"type": "string", "nullable": True}, ['"x"', "null"], ["1"]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, ["1", "false"], ['"x"']),
        ({"oneOf": [{"const": "x"}, {"type": "array", "items": {"type": "null"}}]}, ['"x"', "[null, null]"], ["[1]"]),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"const": 1}}}]},
         ['{"a":3}', '{"a":3,"b":1}'], ["{}", '{"a":3,"b":2}']),
        ({"properties": {"k": {"const": "p"}}, "required": ["k"],
          "anyOf": [{"properties": {"x": {"const": 1}}, "required": ["x"]}]},
         ['{"k":"p","x":1}'], ['{"k":"p"}']),
        (TREE, ["{}", '{"v":1,"next":{"v":2,"next":{}}}'], ['{"next":1}']),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
         ["[1]", "[1, 2]"], ["[]", "[1,2,3]"]),
        ({"type": "array", "minItems": 2}, ["[1, {}]"], ["[1]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"prefixItems": [{"type": "integer"}, {"const": "x"}]}, ['[1, "x"]'], ["[1]"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äbc"', '"\\n\\n"'], ['"a"', '"abcd"']),
        ({"type": "string", "pattern": "^[a-c]+\\d{2}$"}, ['"abc12"'], ['"abc1"', '"d12"']),
        ({"type": "string", "pattern": "x|yy"}, ['"x"', '"..yy.."'], ['"y"']),
        ({"type": "string", "pattern": "^(ab|\\\")?[^0-9]*$"}, ['"ab-"', '"\\"z"', '""'], ['"1"']),
        ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"2026-13-01"']),
        ({"type": "string", "format": "date-time"}, ['"2026-01-31T10:20:30Z"'], ['"2026-01-31"']),
        ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
        ({"type": "string", "format": "email"}, ['"whatever"'], ["1"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "1.5"]),
        ({"type": "integer", "minimum": 0}, ["0", "77"], ["-1"]),
        ({"type": "integer", "minimum": 1}, ["1"], ["0", "-1"]),
        ({"type": "number"}, ["-1.5e10", "0", "3"], ["1.", ".5", "01"]),
        ({"type": "string"}, ['"\\u00e9\\\\ \\" é😀"'], ['"\n"', '"\\x"']),
    ],
)  # fmt: skip
def test_schemas(matches: Matches, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = schema_grammar(schema, "response_format")
    assert [t for t in good if not matches(grammar, t)] == []
    assert [t for t in bad if matches(grammar, t)] == []


DEEP: Any = {"type": "integer"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "schema",
    [
        5,
        False,
        {"type": "nonsense"},
        {"type": 7},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/nowhere"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=look)ahead"},
        {"type": "string", "pattern": "(a)\\1"},
        {"type": "string", "pattern": "a{100000}"},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "minLength": -1},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"properties": {"a": 1}},
        {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(5000)}},
        DEEP,
    ],
)
def test_what_cannot_be_enforced_is_said(schema: Any) -> None:
    with pytest.raises(RequestError) as refused:
        schema_grammar(schema, "response_format")
    assert refused.value.param == "response_format"
    assert "cannot be enforced" in refused.value.message


LEAVES = st.sampled_from(
    [
        {"type": "string"}, {"type": "integer", "maximum": 5}, {"type": "boolean"}, {"enum": ["a", 1, None]}, True,
        {"type": "number"}, {"type": "string", "maxLength": 3000}, {"format": "date", "type": "string"},
    ]
)  # fmt: skip
KEYS = st.text(max_size=4)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 4)),
        st.builds(
            lambda p, e: {"type": "object", "properties": p, "required": list(p)[::2], "additionalProperties": e},
            st.dictionaries(KEYS, inner, max_size=4),
            st.booleans() | inner,
        ),
        st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schema_gives_a_grammar_that_parses(matches: Matches, schema: Any) -> None:
    assert matches(schema_grammar(schema, "x"), "") is False


TOOLS = [
    Tool("weather", "", {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
        "required": ["city", "unit"],
    }),
    Tool("now", "", {"type": "object", "properties": {}}),
]  # fmt: skip
CALL = '{"name": "weather", "arguments": {"city": "Ulm", "unit": "C"}}'
TEMPLATES = {
    "hermes": ("<tool_call> {{tools}}", f"<tool_call>\n{CALL}\n</tool_call>"),
    "hermes_thinking": (
        "<tool_call></think>{{tools}}", f"<think>\nHm < 3.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
    ),
    "tagged": (
        "<tool_call><function=x><parameter=y>{{tools}}",
        "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "mistral": ("[TOOL_CALLS]{{tools}}", f"[TOOL_CALLS][{CALL}]"),
    "llama3": ("ipython {{tools}}", CALL.replace("arguments", "parameters")),
    "harmony": (
        "<|channel|>{{tools}}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Ulm", "unit": "C"}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_are_what_the_parser_reads(matches: Matches, name: str) -> None:
    template, text = TEMPLATES[name]
    spoken = read_format(template)
    grammar = call_answer(TOOLS, spoken, "prompt", several=False)
    assert matches(grammar, text)
    assert not matches(grammar, "Just words.")
    assert not matches(grammar, text.replace("Ulm", "Ulm").replace("weather", "nothing"))
    parser = make_parser(spoken, "prompt", {t.name: t.parameters for t in TOOLS}, reasoning=True, special=True)
    deltas = parser.feed(text) + parser.finish()
    assert [d.name for d in deltas if isinstance(d, CallStart)] == ["weather"]
    arguments = "".join(d.text for d in deltas if isinstance(d, CallArguments))
    assert json.loads(arguments) == {"city": "Ulm", "unit": "C"}


def test_several_calls_only_where_asked(matches: Matches) -> None:
    spoken = read_format("<tool_call>{{tools}}")
    twice = "\n".join(['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'] * 2)
    assert matches(call_answer(TOOLS, spoken, "", several=True), twice)
    assert not matches(call_answer(TOOLS, spoken, "", several=False), twice)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_json_answer_leaves_calls_possible(matches: Matches, name: str) -> None:
    template, call = TEMPLATES[name]
    spoken = read_format(template)
    grammar = json_answer({"const": 1}, spoken, "", param="x", tools=TOOLS)
    assert matches(grammar, call)
    assert matches(grammar, "<|channel|>final<|message|>1" if name == "harmony" else "1")
    assert not matches(grammar, "2")


def test_a_json_answer_may_be_thought_about_first(matches: Matches) -> None:
    schema = {"const": 1}
    thinker = read_format("<think></think>")
    assert matches(json_answer(schema, thinker, "prompt", param="x"), "<think>\nhm\n</think>\n\n1")
    assert matches(json_answer(schema, thinker, "prompt", param="x"), "1")
    assert matches(json_answer(schema, thinker, "prompt<think>\n", param="x"), "hm</think>1")
    assert not matches(json_answer(schema, thinker, "prompt<think>\n", param="x"), "1")
    harmony = read_format("<|channel|>")
    assert matches(
        json_answer(schema, harmony, "", param="x"),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>1",
    )
