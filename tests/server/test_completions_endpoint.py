"""`/v1/completions`, tokens, templates and the endpoints that describe the server, on the real model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import N_CTX, LiveServer
from tests.server.test_chat_endpoint import stream

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16}
TEXT = "The capital of France is Paris."


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Any:
    with live.client() as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={**GREEDY, **fields})


def test_text_tokens_and_lists_of_one_are_the_same_prompt(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    for prompt in (PROMPT, [PROMPT], tokens, [tokens]):
        answer = complete(http, prompt=prompt).json()
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["text"] == TEXT
        assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_stream(http: httpx.Client) -> None:
    chunks = stream(http, "/v1/completions", **GREEDY, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks[:-2]) == TEXT
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"] == []
    assert {"usage", "timings", "expertd"} <= chunks[-2].keys()


def test_echo_comes_first(http: httpx.Client) -> None:
    assert complete(http, echo=True).json()["choices"][0]["text"] == PROMPT + TEXT
    chunks = stream(http, "/v1/completions", **GREEDY, echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == PROMPT + TEXT


def test_logprobs_in_the_older_form(http: httpx.Client) -> None:
    whole = complete(http, logprobs=2).json()["choices"][0]
    found = whole["logprobs"]
    assert "".join(found["tokens"]) == whole["text"] == TEXT
    assert all(lp <= 0 for lp in found["token_logprobs"])
    assert all(len(top) == 2 for top in found["top_logprobs"])
    assert [TEXT[o : o + len(t)] for o, t in zip(found["text_offset"], found["tokens"], strict=True)] == found["tokens"]
    chunks = stream(http, "/v1/completions", **GREEDY, logprobs=2)
    parts = [c["choices"][0]["logprobs"] for c in chunks[:-1] if c["choices"][0]["logprobs"]]
    assert [t for p in parts for t in p["tokens"]] == found["tokens"]
    assert [o for p in parts for o in p["text_offset"]] == found["text_offset"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": ""}, 200),
        ({"prompt": []}, 400),
        ({"prompt": ["a", "b"]}, 400),
        ({"prompt": [[1, 2], [3]]}, 400),
        ({"prompt": [1, "a"]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": [10**6]}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"prompt": None}, 400),
        ({"best_of": 2}, 400),
        ({"suffix": "tail"}, 400),
        ({"suffix": ""}, 200),
        ({"echo": True, "logprobs": 1}, 400),
        ({"logprobs": 21}, 400),
        ({"logprobs": True}, 200),
        ({"n_probs": 1}, 200),
        ({"response_format": {"type": "json_object"}}, 200),
        ({"ignore_eos": True}, 200),
        ({"dry_multiplier": 0.8, "mirostat": 2, "xtc_probability": 0.5, "temperature": 1, "top_n_sigma": 1}, 200),
        ({"mirostat": 1, "temperature": 1, "typical_p": 0.9, "repeat_penalty": 1.1, "dynatemp_range": 0.5}, 200),
        ({"dry_sequence_breakers": ["\n", ""], "dry_multiplier": 1, "dry_allowed_length": 1}, 200),
        ({"repeat_penalty": 0}, 400),
    ],
)
def test_odd_requests_get_their_status(http: httpx.Client, fields: dict[str, Any], status: int) -> None:
    assert complete(http, **{"max_tokens": 4, **fields}).status_code == status


def test_a_time_limit_cuts_the_answer(http: httpx.Client) -> None:
    answer = complete(http, ignore_eos=True, max_tokens=-1, t_max_predict_ms=1).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] < N_CTX


def test_schemas_reach_plain_completions(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}
    text = complete(http, json_schema=schema, max_tokens=40).json()["choices"][0]["text"]
    assert set(json.loads(text)) <= {"a", "b"}


def test_emoji_come_whole_at_any_chunk_border(http: httpx.Client) -> None:
    emoji = "🦀🇫🇷👩‍👩‍👧é漢"
    grammar = f'root ::= "{emoji}"'
    chunks = stream(http, "/v1/completions", **{**GREEDY, "max_tokens": 60}, grammar=grammar)
    texts = [c["choices"][0]["text"] for c in chunks[:-1]]
    assert "".join(texts) == emoji
    assert not any("�" in t for t in texts)
    for stop in ("🇫🇷", "漢", "👧é"):
        stopped = complete(http, grammar=grammar, stop=stop, max_tokens=60).json()["choices"][0]["text"]
        assert stopped == emoji[: emoji.index(stop)]


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "Grüße, <|im_start|> 😀"
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    special = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert len(special) < len(plain)
    for tokens in (plain, special):
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    pieces = http.post("/tokenize", json={"content": "😀a", "with_pieces": True}).json()["tokens"]
    joined = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert joined.decode() == "😀a"
    assert http.post("/detokenize", json={"tokens": [2**40]}).status_code == 400
    assert http.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


def test_apply_template(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    assert http.post("/apply-template", json=body).json() == {"prompt": PROMPT}
    body["add_generation_prompt"] = False  # type: ignore[assignment]
    assert http.post("/apply-template", json=body).json() == {"prompt": PROMPT.removesuffix("<|im_start|>assistant\n")}


def test_models(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["object"] == "model"
    assert http.get(f"/v1/models/{model['id']}").json() == model
    assert http.get("/models").json()["data"] == [model]
    missing = http.get("/v1/models/gpt-4")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


def test_probes_and_props(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").json() == {"status": "ready"}
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == N_CTX
    assert "im_start" in props["chat_template"]
    (slot,) = http.get("/slots").json()
    assert slot["is_processing"] is False


def test_embeddings_say_that_they_are_not_served(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "x", "model": "y"})
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "not_implemented"


def test_what_is_not_there_is_json_too(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]["code"] == "not_found"
    wrong = http.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_the_cache_and_its_heat(http: httpx.Client) -> None:
    report = http.get("/expertd/cache").json()
    assert report["hits"] + report["misses"] == report["requests"] > 0
    assert len(report["layers"]) == 8
    heat = http.get("/expertd/heatmap").json()
    packed = http.get("/expertd/heatmap", headers={"accept": "application/octet-stream"})
    assert len(packed.content) == len(heat["layers"]) * heat["n_experts"] == 512
    assert packed.headers["x-expertd-experts"] == "64"
    assert [b >> 6 for b in packed.content] == [s for row in heat["state"] for s in row]
    status = http.get("/expertd/status").json()
    assert status["state"] == "ready"
    assert status["model"]["n_experts"] == 64
    assert status["cache"]["experts"]["total"] == 512
