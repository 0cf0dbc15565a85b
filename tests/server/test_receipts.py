"""Timings and the root `expertd` object in every form of answer: whole and streamed, of each of the four APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import LiveServer

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
FORMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "The capital of France", "max_tokens": 4},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 4},
    "/v1/messages": {"model": "any", "messages": MESSAGES, "max_tokens": 4},
}
RECEIPT = {
    "expert_requests", "expert_hits", "bytes_read", "io_wait_ms", "major_faults", "queue_ms", "first_token_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def bills_of(path: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What carries a receipt: the event itself; of a responses stream the response in it."""
    holders = [e["response"] for e in events if "response" in e] if path == "/v1/responses" else events
    return [h for h in holders if "expertd" in h]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_form_is_billed_once(http: httpx.Client, path: str, stream: bool, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = http.post(path, json={**FORMS[path], **options, "stream": stream, "temperature": 0})
    assert answer.status_code == 200
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        bills = bills_of(path, [json.loads(line) for line in lines if line != "[DONE]"])
    else:
        bills = [answer.json()]
    (bill,) = bills
    receipt, timings = bill["expertd"], bill["timings"]
    assert set(receipt) == RECEIPT
    assert 0 <= receipt["expert_hits"] <= receipt["expert_requests"]
    assert receipt["expert_requests"] > 0
    assert receipt["bytes_read"] >= 0
    assert receipt["major_faults"] >= 0
    assert receipt["io_wait_ms"] is None or receipt["io_wait_ms"] >= 0
    assert receipt["first_token_ms"] > 0
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] > 0
