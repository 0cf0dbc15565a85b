"""`/v1/chat/completions` on the real model: shapes, stream order, limits, odd input (S3), the same text twice (S5)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import N_CTX, LiveServer

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"messages": ASK, "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Any:
    with live.client() as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={**GREEDY, **fields})


def stream(http: httpx.Client, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
    """The data of a stream, as JSON; "[DONE]" as text."""
    with http.stream("POST", path, json={**GREEDY, "stream": True, **fields}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def content(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1] if c["choices"])


def test_whole_answer(http: httpx.Client) -> None:
    answer = chat(http).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["model"] == "tiny-moe-q4_0"
    usage, timings, receipt = answer["usage"], answer["timings"], answer["expertd"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"]
    assert 0 <= receipt["expert_hits"] <= receipt["expert_requests"]
    assert receipt["expert_requests"] > 0
    assert {"bytes_read", "io_wait_ms", "major_faults"} <= receipt.keys()


def test_stream_order(http: httpx.Client) -> None:
    chunks = stream(http, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    *deltas, finish, usage = chunks[:-1]
    assert deltas[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(chunks) == "The capital of France is Paris."
    assert all(d["choices"][0]["finish_reason"] is None for d in deltas)
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert {"timings", "expertd"} <= usage.keys()
    assert len({(c["id"], c["created"]) for c in chunks[:-1]}) == 1


def test_stream_without_usage_bills_the_last_chunk(http: httpx.Client) -> None:
    *_, finish, done = stream(http)
    assert done == "[DONE]"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert {"timings", "expertd"} <= finish.keys()
    assert "usage" not in finish


def test_the_same_prompt_twice_gives_the_same_text(http: httpx.Client) -> None:
    texts = {chat(http, max_tokens=40).json()["choices"][0]["message"]["content"] for _ in range(3)}
    texts |= {content(stream(http, max_tokens=40))}
    texts |= {chat(http, max_tokens=40, cache_prompt=False).json()["choices"][0]["message"]["content"]}
    assert len(texts) == 1


def test_seed_decides(http: httpx.Client) -> None:
    fields = {"temperature": 3, "max_tokens": 24, "top_k": 0, "top_p": 1, "min_p": 0}
    texts = [chat(http, seed=s, **fields).json()["choices"][0]["message"]["content"] for s in (7, 7, 8)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_token_limits_are_one_setting(http: httpx.Client, name: str) -> None:
    body = {"messages": ASK, "temperature": 0, name: 3}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [None, -1])
def test_no_token_limit(http: httpx.Client, limit: int | None) -> None:
    answer = chat(http, max_tokens=limit).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_zero_tokens_reads_the_prompt_alone(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=0).json()
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == ""


def test_a_prompt_beyond_the_context_is_refused_with_counts(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": "word " * N_CTX}).json()["tokens"]
    exact = http.post("/v1/completions", json={"prompt": tokens[: N_CTX + 1], "max_tokens": 1})
    assert exact.status_code == 400
    error = exact.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] == N_CTX + 1
    assert error["n_ctx"] == N_CTX
    streamed = chat(http, messages=[{"role": "user", "content": "word " * N_CTX}], stream=True)
    assert streamed.status_code == 400
    assert streamed.headers["content-type"] == "application/json"


PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": [{"role": "user", "content": PARTS}]}, 200),
        ({"messages": [{"role": "user", "content": [*PARTS, IMAGE]}]}, 400),
        ({"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": []}, *ASK]}, 200),
        ({"messages": [*ASK, *ASK]}, 200),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *ASK]}, 200),
        ({"messages": []}, 400),
        ({"messages": "hello"}, 400),
        ({"messages": [{"content": "no role"}]}, 400),
        ({"messages": ASK, "model": "gpt-4"}, 200),
        ({"messages": ASK, "n": 2}, 400),
        ({"messages": ASK, "n": 1}, 200),
        ({"messages": ASK, "tools": [], "tool_choice": "auto"}, 200),
        ({"messages": ASK, "tool_choice": "required"}, 400),
        ({"messages": ASK, "temperature": "hot"}, 400),
        ({"messages": ASK, "temperature": None, "top_p": None, "stop": None, "seed": None}, 200),
        ({"messages": ASK, "top_p": 2}, 400),
        ({"messages": ASK, "max_tokens": -2}, 400),
        ({"messages": ASK, "seed": 2**70}, 200),
        ({"messages": ASK, "seed": -1}, 200),
        ({"messages": ASK, "logit_bias": {"99999999": 1}}, 400),
        ({"messages": ASK, "logit_bias": {"5": -100}}, 200),
        ({"messages": ASK, "logit_bias": [["the", False], [7, 0.5]]}, 200),
        ({"messages": ASK, "grammar": "this is no grammar"}, 400),
        ({"messages": ASK, "response_format": {"type": "xml"}}, 400),
        ({"messages": ASK, "response_format": {"type": "json_schema"}}, 400),
        ({"messages": ASK, "stop": ["x"] * 65}, 400),
        ({"messages": ASK, "unheard_of": {"deep": [1, 2]}}, 200),
    ],
)  # fmt: skip
def test_odd_requests_get_their_status(http: httpx.Client, fields: dict[str, Any], status: int) -> None:
    answer = http.post("/v1/chat/completions", json={"max_tokens": 4, **fields})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"not json", b"\xff\xfe", b'{"messages": "\\ud800"}', b"[]", b"null", b"[" * 5000]
)
def test_what_is_no_json_is_a_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_errors_name_the_path(http: httpx.Client) -> None:
    error = chat(http, messages=[{"role": "user", "content": [{"type": 5}]}]).json()["error"]
    assert error["param"] == "messages"
    assert "messages[0].content" in error["message"]


def test_every_byte_value_in_a_prompt(http: httpx.Client) -> None:
    text = "".join(map(chr, range(256))) + "😀\U0010ffff"
    assert chat(http, messages=[{"role": "user", "content": text}], max_tokens=2).status_code == 200
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    every_byte = http.post("/v1/completions", content=b'{"max_tokens": 1, "prompt": "' + bytes(range(256)) + b'"}')
    assert every_byte.status_code == 400


def test_a_stop_string_does_not_leak(http: httpx.Client) -> None:
    for stop in ("France", "ance is", " Par"):
        whole = chat(http, stop=stop).json()["choices"][0]
        text = "The capital of France is Paris."
        assert whole["message"]["content"] == text[: text.index(stop)]
        assert whole["finish_reason"] == "stop"
        assert content(stream(http, stop=[stop, "never"])) == text[: text.index(stop)]


def test_logprobs(http: httpx.Client) -> None:
    whole = chat(http, logprobs=True, top_logprobs=3).json()
    tokens = whole["choices"][0]["logprobs"]["content"]
    assert len(tokens) == whole["usage"]["completion_tokens"]
    assert "".join(t["token"] for t in tokens) == whole["choices"][0]["message"]["content"]
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert bytes(token["bytes"]).decode() == token["token"]
    chunks = stream(http, logprobs=True)
    streamed = [t for c in chunks[:-1] for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [t["token"] for t in streamed] == [t["token"] for t in tokens]
    assert all(t["top_logprobs"] == [] for t in streamed)


def test_json_object_and_schema(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "size": {"enum": ["small", "big"]},
            "years": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 3},
        },
        "required": ["city", "size", "years"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "town", "schema": schema, "strict": True}}
    answer = chat(http, response_format=form, max_tokens=200, temperature=1.0, seed=3).json()["choices"][0]
    value = json.loads(answer["message"]["content"])
    assert value.keys() == {"city", "size", "years"}
    assert value["size"] in ("small", "big")
    assert 1 <= len(value["years"]) <= 3
    assert answer["finish_reason"] == "stop"
    whole = content(stream(http, response_format={"type": "json_object"}, max_tokens=300, seed=1))
    assert whole.startswith("{")


def test_a_grammar_holds(http: httpx.Client) -> None:
    answer = chat(http, grammar='root ::= "yes" | "no"').json()["choices"][0]
    assert answer["message"]["content"] in ("yes", "no")


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call(http: httpx.Client, choice: Any) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    answer = chat(http, **fields).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    chunks = stream(http, **fields)
    deltas = [d for c in chunks[:-1] for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert deltas[0]["id"]
    assert len(deltas) > 2, "arguments come in pieces"
    assert "".join(d["function"]["arguments"] for d in deltas) == call["function"]["arguments"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_conversation_with_tools_goes_through(http: httpx.Client) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": "18 degrees"},
    ]
    shown = http.post("/apply-template", json={"messages": history, "tools": [WEATHER]}).json()["prompt"]
    for text in ("get_weather", '"city":"Paris"', "18 degrees", "<tool_call>"):
        assert text in shown
    assert chat(http, messages=history, tools=[WEATHER]).status_code == 200


def test_the_assistants_beginning_is_continued(http: httpx.Client) -> None:
    history = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    assert chat(http, messages=history).json()["choices"][0]["message"]["content"].strip() == "Paris."


def test_progress_is_told_to_who_asks(http: httpx.Client) -> None:
    chunks = stream(http, return_progress=True, cache_prompt=False)
    told = [c["prompt_progress"] for c in chunks[:-1] if "prompt_progress" in c]
    assert told[-1]["processed"] == told[-1]["total"] > 0
    assert content(chunks) == "The capital of France is Paris."
