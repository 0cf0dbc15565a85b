"""The life of one exchange: errors before and after the first byte, comments while silent, clients that go or stall."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from expertd.errors import (
    ContextFullError,
    EngineError,
    ExpertdError,
    NotReadyError,
    QueueFullError,
    RequestError,
    StateError,
)
from expertd.runtime.requests import Finished, Piece, PromptProgress, Queued, Receipt, Timings
from expertd.server.errors import STATUS, status_of
from tests.server.conftest import LiveServer
from tests.server.doubles import DONE, Double

Start = Callable[..., LiveServer]
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
GENERATING = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {**ASK, "max_tokens": 10},
}


def until(condition: Callable[[], bool]) -> None:
    """Waits for what the server does in its own time."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


def all_errors(kind: type[ExpertdError] = ExpertdError) -> set[type[ExpertdError]]:
    return {kind}.union(*(all_errors(k) for k in kind.__subclasses__()))


def test_every_code_of_the_house_has_a_status() -> None:
    of_the_cli = {"refused", "demo", "listen"}
    codes = {k.code for k in all_errors() if k.__module__.startswith("expertd.")} - of_the_cli
    assert codes <= STATUS.keys()
    assert status_of(NotReadyError("x")) == 503


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestError("a bad thing", param="grammar"), 400, None),
        (ContextFullError(70, 64), 400, None),
        (QueueFullError("full", retry_after_seconds=2.2), 429, "3"),
        (NotReadyError("loading"), 503, "5"),
        (EngineError("decode failed"), 500, None),
        (RuntimeError("a secret detail"), 500, None),
    ],
)
def test_an_error_before_the_first_byte_is_plain_http(
    start_server: Start, error: Exception, status: int, retry: str | None
) -> None:
    server = start_server(Double(script=[error]))
    with server.client() as http:
        for path, stream in itertools.product(GENERATING, (False, True)):
            answer = http.post(path, json={**GENERATING[path], "stream": stream})
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers.get("retry-after") == retry
            body = answer.json()
            assert body["error"]["message"]
            assert "secret" not in answer.text
            if path == "/v1/messages":
                assert body["type"] == "error"
                assert body["request_id"] == answer.headers["x-request-id"]
            else:
                assert body["error"].keys() >= {"message", "type", "param", "code"}


def test_an_error_later_is_an_event_without_done(start_server: Start) -> None:
    double = Double()
    server = start_server(double)
    for late in (EngineError("decode failed", hint="see the log"), RuntimeError("a secret detail")):
        double.script = [Piece("Hel", (1,)), late]
        with server.client() as http:
            answer = http.post("/v1/chat/completions", json={**ASK, "stream": True})
            *_, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            assert "[DONE]" not in answer.text
            assert "secret" not in answer.text
            messages = http.post("/v1/messages", json={**GENERATING["/v1/messages"], "stream": True}).text
            assert "event: error\n" in messages
            assert "message_stop" not in messages
            responses = http.post("/v1/responses", json={"input": "Hello", "stream": True}).text
            assert "event: response.failed\n" in responses
            assert "response.completed" not in responses


def test_positions_and_progress_are_comments(start_server: Start) -> None:
    script = [Queued(2), Queued(1), PromptProgress(0, 3, 0), PromptProgress(3, 3, 0), Piece("Hi", (1,)), DONE]
    server = start_server(Double(script=script))
    with server.client() as http:
        for path, body in GENERATING.items():
            text = http.post(path, json={**body, "stream": True}).text
            assert ": queued position=2\n" in text
            assert ": prompt 3/3 cached=0\n" in text
            assert "queue_position" not in text
        asked = http.post("/v1/chat/completions", json={**ASK, "stream": True, "return_progress": True}).text
    assert '"queue_position":2' in asked
    assert '"prompt_progress":{"total":3,"cache":0,"processed":3' in asked


def test_a_silent_stream_gets_comments(start_server: Start) -> None:
    server = start_server(Double(script=[0.3, Piece("Hi", (1,)), 0.3, DONE]), keepalive_seconds=0.1)
    with server.client() as http:
        for path, body in GENERATING.items():
            text = http.post(path, json={**body, "stream": True}).text
            assert text.count(": keep-alive\n\n") >= 3
            assert "Hi" in text
        whole = http.post("/v1/chat/completions", json=ASK)
    assert whole.json()["choices"][0]["message"]["content"] == "Hi"


def test_a_client_that_goes_ends_the_generation(start_server: Start) -> None:
    double = Double(script=[Piece("Hi", (1,)), 60.0, DONE])
    server = start_server(double)
    for path, stream in itertools.product(GENERATING, (False, True)):
        before = double.closed
        with pytest.raises(httpx.TimeoutException):
            httpx.post(server.url + path, json={**GENERATING[path], "stream": stream}, timeout=0.2)
        until(lambda before=before: double.closed == before + 1)
    assert server.call(lambda: len(asyncio.all_tasks(server.loop))) < 10
    with server.client() as http:
        assert http.get("/livez").status_code == 200


def test_a_client_that_goes_within_its_body_is_no_error(start_server: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(Double())
    with server.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: ("/v1/chat/completions", 499) in server.app.state.context.counts)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_client_that_takes_nothing_is_dropped(start_server: Start) -> None:
    double = Double(script=[Piece("x" * 100_000, (1,))] * 400 + [DONE])
    server = start_server(double, keepalive_seconds=0.2, stall_seconds=0.5)
    body = json.dumps({**ASK, "stream": True}).encode()
    with server.connect() as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        until(lambda: double.closed == 1)


def test_a_stop_of_the_server_ends_streams_with_an_error(start_server: Start) -> None:
    double = Double(script=[Piece("Hi", (1,)), 60.0, DONE])
    server = start_server(double, drain_seconds=1)
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        server.loop.call_soon_threadsafe(server.http.stop)
        rest = "\n".join(lines)
    assert "expertd is stopping" in rest
    assert "[DONE]" not in rest
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert double.closed == 1


def test_a_stop_ends_watchers(start_server: Start) -> None:
    server = start_server(Double())
    with server.client() as http, http.stream("GET", "/expertd/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: state"
        assert json.loads(next(lines).removeprefix("data: "))["state"] == "ready"
        server.loop.call_soon_threadsafe(server.http.stop)
        assert any(line == "event: cache" for line in lines)
    server.thread.join(10)
    assert not server.thread.is_alive()


def test_before_the_model_is_there(start_server: Start) -> None:
    double = Double(model=None, state="loading", script=[NotReadyError("loading")])
    double.progress.what, double.progress.done, double.progress.total = "load", 30, 120
    server = start_server(double)
    with server.client() as http:
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        ready = http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["progress"] == {"what": "load", "done": 30, "total": 120, "percent": 25.0}
        assert http.get("/livez").status_code == 200
        assert http.get("/v1/models").json()["data"] == []
        for path, body in GENERATING.items():
            answer = http.post(path, json=body)
            assert answer.status_code == 503, path
            assert answer.headers["retry-after"]
        for path in ("/props", "/slots", "/v1/models/x"):
            assert http.get(path).status_code == 503
        assert http.post("/tokenize", json={"content": "x"}).status_code == 503
    double.state, double.failure = "failed", "the file is short by 3 bytes"
    with server.client() as http:
        assert "short by 3 bytes" in http.get("/health").text
        assert http.get("/readyz").json()["message"] == "the file is short by 3 bytes"
        assert "short by 3 bytes" in http.post("/v1/chat/completions", json=ASK).text


def test_a_template_that_raises_is_a_400_with_its_message(start_server: Start) -> None:
    double = Double(template_error=RequestError("roles must alternate", param="messages"))
    server = start_server(double)
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={"messages": [*ASK["messages"], *ASK["messages"]]})
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def answer_with(text: str, **changes: Any) -> Double:
    """A double whose model writes `text`, cut into small pieces."""
    pieces = [Piece(text[i : i + 3], (i,)) for i in range(0, len(text), 3)]
    return Double(script=[*pieces, Finished("stop", "", 3, Timings(1, 2, 1.0, len(pieces), 1.0), Receipt())], **changes)


def test_reasoning_is_apart_from_content(start_server: Start) -> None:
    server = start_server(answer_with("<think>\nLet me see.\n</think>\n\nYes."))
    with server.client() as http:
        message = http.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == "Let me see."
        raw = http.post("/v1/chat/completions", json={**ASK, "reasoning_format": "none"}).json()["choices"][0][
            "message"
        ]
        assert raw["content"].startswith("<think>")
        blocks = http.post("/v1/messages", json=GENERATING["/v1/messages"]).json()["content"]
        assert blocks == [
            {"type": "thinking", "thinking": "Let me see.", "signature": ""},
            {"type": "text", "text": "Yes."},
        ]
        items = http.post("/v1/responses", json={"input": "Hello"}).json()["output"]
        assert [i["type"] for i in items] == ["reasoning", "message"]


def test_harmony_asks_for_control_tokens_and_shows_none(start_server: Start) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a":1}<|call|>'
    )
    double = answer_with(text)
    double.model = type("Model", (), {**vars(double.model), "chat_template": "<|start|>{{x}}<|channel|>{{tools}}"})
    server = start_server(double)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with server.client() as http:
        choice = http.post("/v1/chat/completions", json={**ASK, "tools": [tool]}).json()["choices"][0]
    assert double.requests[0].render_special
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert "<|" not in json.dumps(choice)
    assert double.rendered[0]["tools"][0]["function"]["name"] == "f"


def test_the_servers_limits_reach_the_request(start_server: Start) -> None:
    double = Double()
    server = start_server(double, max_tokens=7, request_seconds=5.0)
    with server.client() as http:
        http.post("/v1/chat/completions", json=ASK)
        short = {"max_tokens": 3, "t_max_predict_ms": 1000, "expertd_profile": "code"}
        http.post("/v1/chat/completions", json={**ASK, **short})
        http.post("/v1/chat/completions", json={**ASK, "max_tokens": 100}, headers={"x-expertd-profile": "prose"})
    assert [(r.max_tokens, r.time_limit_seconds, r.profile) for r in double.requests] == [
        (7, 5.0, None),
        (3, 1.0, "code"),
        (7, 5.0, "prose"),
    ]


def test_states_of_profiles_are_conflicts() -> None:
    assert status_of(StateError("torn")) == 409
