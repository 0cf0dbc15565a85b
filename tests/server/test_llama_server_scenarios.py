"""Scenarios of llama-server's own test suite, restated for our endpoints where the other tests do not have them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.conftest import LiveServer
from tests.server.test_chat_endpoint import content, stream

QUESTION = {"role": "user", "content": "What is the capital of France?"}
GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Any:
    with live.client() as client:
        yield client


def turn(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> Any:
    answer = http.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})
    assert answer.status_code == 200
    return answer.json()


def test_a_second_turn_reuses_the_first(http: httpx.Client) -> None:
    first = turn(http, [{"role": "system", "content": "You are turn one."}, QUESTION])
    said = first["choices"][0]["message"]
    history = [{"role": "system", "content": "You are turn one."}, QUESTION, said, {"role": "user", "content": "And?"}]
    second = turn(http, history)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]
    assert second["timings"]["cache_n"] == cached


def test_two_conversations_in_turns_are_both_kept(http: httpx.Client) -> None:
    one = [{"role": "system", "content": "The first conversation, about bread."}, QUESTION]
    two = [{"role": "system", "content": "Another one, which is about wine."}, QUESTION]
    texts = [turn(http, c)["choices"][0]["message"]["content"] for c in (one, two)]
    again = [turn(http, c) for c in (one, two, one)]
    assert [a["choices"][0]["message"]["content"] for a in again] == [*texts, texts[0]]
    for answer in again:
        assert answer["timings"]["cache_n"] >= answer["usage"]["prompt_tokens"] - 1


def test_without_cache_prompt_nothing_is_reused(http: httpx.Client) -> None:
    turn(http, [QUESTION])
    assert turn(http, [QUESTION], cache_prompt=False)["timings"]["cache_n"] == 0


def test_many_at_once_say_what_one_alone_says(live: LiveServer, http: httpx.Client) -> None:
    expected = turn(http, [QUESTION])["choices"][0]["message"]["content"]

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as a:
            body = {"messages": [QUESTION], **GREEDY}
            return await asyncio.gather(*(a.post("/v1/chat/completions", json=body) for _ in range(5)))

    answers = asyncio.run(run())
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {expected}


def test_a_biased_token_is_not_said(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": " P", "parse_special": False}).json()["tokens"]
    for bias in ({str(tokens[0]): -100}, [[tokens[0], False]], [[" P", False]]):
        answer = turn(http, [QUESTION], logit_bias=bias, logprobs=True)
        assert " P" not in [t["token"] for t in answer["choices"][0]["logprobs"]["content"]]


def test_a_stream_says_what_the_whole_says(http: httpx.Client) -> None:
    for fields in (
        {"temperature": 0},
        {"temperature": 1.2, "seed": 5},
        {"grammar": "root ::= [a-z ]{5,12}", "seed": 1},
    ):
        whole = turn(http, [QUESTION], **fields)["choices"][0]["message"]["content"]
        assert content(stream(http, messages=[QUESTION], **{**GREEDY, **fields})) == whole


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= root",
        'root ::= ("a"*)*',
        'root ::= ""',
        "root ::= undefined",
        'root ::= "a"{99999}',
        "r ::= [",
        "\ud7ff",
    ],
)
def test_a_nasty_grammar_hangs_nothing(http: httpx.Client, grammar: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [QUESTION], **GREEDY, "grammar": grammar})
    assert answer.status_code in (200, 400)
    assert turn(http, [QUESTION])["choices"][0]["finish_reason"] == "stop"


def test_anthropic_blocks(http: httpx.Client) -> None:
    body = {
        "model": "x",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Calling."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18 C"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    }
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    count = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert http.post("/v1/messages", json={**body, "tool_choice": {"type": "tool"}}).status_code == 400
