"""Model output into content, reasoning and calls: whatever the cuts, the same; and no markup is left over."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.server.output.deltas import CallArguments, CallStart, Content, Delta, Parser, Plain, Reasoning
from expertd.server.output.harmony import HarmonyParser
from expertd.server.output.hermes import HermesParser
from expertd.server.output.llama3 import Llama3Parser
from expertd.server.output.mistral import MistralParser
from expertd.server.output.think import TAGS, ThinkParser

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "f": {}}
NAMES = frozenset(SCHEMAS)

Whole = tuple[str, str, list[tuple[str, str]]]


def merge(deltas: list[Delta]) -> Whole:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(number, name):
                assert number == len(calls)
                calls.append((name, ""))
            case CallArguments(number, text):
                calls[number] = (calls[number][0], calls[number][1] + text)
    return content, reasoning, calls


def parse(parser: Parser, pieces: list[str]) -> Whole:
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return merge(deltas + parser.finish())


PARSERS: dict[str, Callable[[], Parser]] = {
    "think": lambda: ThinkParser(Plain()),
    "think_opened": lambda: ThinkParser(Plain(), opened=True),
    "think_mistral": lambda: ThinkParser(MistralParser(), TAGS[1]),
    "hermes": lambda: HermesParser(SCHEMAS),
    "tagged": lambda: ThinkParser(HermesParser(SCHEMAS, bare=True)),
    "mistral": MistralParser,
    "llama3": lambda: Llama3Parser(NAMES),
    "harmony": HarmonyParser,
    "harmony_without_calls": lambda: HarmonyParser(with_calls=False),
}

FRAGMENTS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "<|eot_id|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
    "<|constrain|>", "assistant", "analysis", "final", "commentary to=functions.f ", "json", "<function=weather>",
    "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    '{"name": "f", "arguments": {"a": "}\\"{"}}', '{"arguments": {"a": [1, {"b": 2}]}, "name": "weather"}',
    '{"name": "f", "parameters": "{\\"a\\": 1}"}', '{"name": "nobody", "arguments": {}}', '{"name": ', '"f"', "{", "}",
    "[", "]", ",", ";", '"', "\\", " ", "\n", "\n\n", "a", "é", "😀", "<", "[T", "<|", "t", "to=",
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data())
@settings(max_examples=150, deadline=None)
def test_cuts_do_not_matter(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(PARSERS[name](), [text])
    assert parse(PARSERS[name](), pieces) == whole
    assert parse(PARSERS[name](), list(text)) == whole


LEAKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3": ("<|python_tag|>", "<|eot_id|>"),
    "harmony": ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
}


@pytest.mark.parametrize("name", LEAKS)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
@settings(max_examples=150, deadline=None)
def test_no_marker_is_shown(name: str, fragments: list[str]) -> None:
    content, reasoning, _ = parse(PARSERS[name](), ["".join(fragments)])
    for marker in LEAKS[name]:
        assert marker not in content
        assert marker not in reasoning


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>\nhm\n</think>\n\nYes.", ("Yes.", "hm", [])),
        ("think", "  no tags", ("  no tags", "", [])),
        ("think", "<think>\n\n</think>\n\nYes.", ("Yes.", "", [])),
        ("think", "<think>cut off", ("", "cut off", [])),
        ("think", "a <think> in the middle", ("a <think> in the middle", "", [])),
        ("think", "<thi", ("<thi", "", [])),
        ("think_opened", "hm\n</think>\nYes.", ("Yes.", "hm", [])),
        ("think_mistral", "[THINK]hm[/THINK]Yes.", ("Yes.", "hm", [])),
        ("hermes", "just words\n", ("just words\n", "", [])),
        (
            "hermes",
            'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
            ("Let me look.", "", [("weather", '{"city": "Ulm"}')]),
        ),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"weather"}</tool_call> done',
            ("done", "", [("f", "{}"), ("weather", "{}")]),
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', ("", "", [("f", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", "", [("f", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', ("", "", [("f", '{"a": "cut')])),
        ("hermes", "<tool_call>not json</tool_call>.", ("not json.", "", [])),
        (
            "hermes",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
            ("", "", [("weather", '{"city":"12","days":3}')]),
        ),
        (
            "tagged",
            "<think>a</think><function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            ("", "a", [("weather", '{"city":"New\\nYork","days":2}')]),
        ),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]</s>', ("", "", [("f", '{"a": 1}')])),
        (
            "mistral",
            'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]x[ARGS]{}',
            ("Hm.", "", [("f", '{"a": 1}'), ("weather", "{}")]),
        ),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {"city": "x"}}<|eom_id|>',
            ("", "", [("f", "{}"), ("weather", '{"city": "x"}')]),
        ),
        ("llama3", '{"name": "nobody", "parameters": {}}', ('{"name": "nobody", "parameters": {}}', "", [])),
        ("llama3", '{"answer": 42}', ('{"answer": 42}', "", [])),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            ("Yes.", "hm", []),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city":"Ulm"}<|call|>',
            ("", "hm", [("weather", '{"city":"Ulm"}')]),
        ),
        (
            "harmony",
            ' to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>',
            ("", "", [("f", '{"a":1}')]),
        ),
        ("harmony", "<|channel|>commentary<|message|>I will look.<|end|>", ("I will look.", "", [])),
        ("harmony", "No harmony at all.", ("No harmony at all.", "", [])),
        ("harmony", "<|channel|>ana", ("", "", [])),
        ("harmony", "to=<|channel|>", ("", "", [])),
        ("harmony", "to", ("to", "", [])),
        ("harmony_without_calls", "<|channel|>commentary to=functions.f<|message|>x", ("", "x", [])),
    ],
)
def test_what_models_write(name: str, text: str, expected: Whole) -> None:
    assert parse(PARSERS[name](), [text]) == expected
    assert parse(PARSERS[name](), list(text)) == expected


@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
@settings(max_examples=100, deadline=None)
def test_any_arguments_come_through(arguments: dict[str, object], ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    for name, text in (
        ("hermes", f"<tool_call>{body}</tool_call>"),
        ("llama3", body),
        ("mistral", f"[TOOL_CALLS][{body}]"),
    ):
        content, _, calls = parse(PARSERS[name](), list(text))
        assert content == ""
        assert [(n, json.loads(a)) for n, a in calls] == [("f", arguments)]


def test_arguments_are_streamed() -> None:
    parser = HermesParser(SCHEMAS)
    parser.feed('<tool_call>{"name": "f", "arguments": {"text": "one')
    assert parser.feed(" two") == [CallArguments(0, " two")]
