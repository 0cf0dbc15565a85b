"""`bench http` against a real server on loopback that streams what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from expertd.bench.http import Answer, Load, run, summarise
from expertd.errors import BenchError, UsageError


class Server(ThreadingHTTPServer):
    """Counts what it is asked; `fail_every` n refuses each n-th request; `usage` False keeps counts to itself."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.fail_every = 0
        self.usage = True
        self.break_stream = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self.send_error(404)
            return
        self._send(200, "application/json", json.dumps({"data": [{"id": "test-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("authorization"))
            number = len(self.server.bodies)
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            if self.server.fail_every and number % self.server.fail_every == 0:
                self._send(503, "application/json", json.dumps({"error": {"message": "too busy"}}).encode())
            else:
                self._stream(body)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        time.sleep(0.05)
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            text = f"w{i} "
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            time.sleep(0.01)
            if self.server.break_stream and i == 1:
                self._event({"error": {"message": "the engine failed"}})
                return
        if self.server.usage:
            usage = {"prompt_tokens": 40, "completion_tokens": body["max_tokens"]}
            details = {"prompt_tokens_details": {"cached_tokens": 8}}
            self._event({"choices": [], "usage": usage | details, "timings": {"prompt_per_second": 640.0, "note": "x"}})
        self.wfile.write(b": comment\n\ndata: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield found
        found.shutdown()


def measure(load: Load) -> tuple[dict[str, Any], list[Answer]]:
    model, answers = asyncio.run(run(load, lambda answer: None))
    return summarise(load, model, answers), answers


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_speeds_and_counts(server: Server, api: str) -> None:
    found, answers = measure(Load(server.url, ("hello", "world"), requests=4, concurrency=2, n_tokens=6, api=api))
    assert (found["completed"], found["failed"], found["model"]) == (4, 0, "test-model")
    assert found["tokens"] == 24
    assert found["tokens_counted_by"] == "usage"
    assert (found["prompt_tokens"], found["cached_tokens"]) == (160, 32)
    assert found["server_prompt_per_second"] == 640
    assert found["server_predicted_per_second"] is None
    for a in answers:
        assert a.ttft_seconds >= 0.05, "the first token, not the empty first chunk"
        assert a.decode_per_second == pytest.approx(5 / (a.seconds - a.ttft_seconds))
        assert a.prompt_per_second == pytest.approx(32 / a.ttft_seconds)
        assert len(a.gaps) == 5
    assert server.most_running == 2
    assert found["total_tokens_per_second"] > 0


def test_prompts_differ_unless_told_otherwise(server: Server) -> None:
    measure(Load(server.url + "/v1/", ("hello",), requests=3, n_tokens=1))
    said = [b["messages"][0]["content"] for b in server.bodies]
    assert said == ["(1) hello", "(2) hello", "(3) hello"]
    measure(Load(server.url, ("hello",), requests=2, n_tokens=1, same=True, api="completion"))
    assert [b["prompt"] for b in server.bodies[3:]] == ["hello", "hello"]


def test_the_key_and_the_model_are_sent(server: Server) -> None:
    measure(Load(server.url, ("x",), requests=1, n_tokens=1, api_key="secret", model="mine"))
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["model"] == "mine"


def test_failures_are_counted_by_message(server: Server) -> None:
    server.fail_every = 2
    found, _ = measure(Load(server.url, ("x",), requests=4, n_tokens=2))
    assert (found["completed"], found["failed"]) == (2, 2)
    assert found["errors"] == {"status 503: too busy": 2}


def test_a_server_that_tells_no_counts(server: Server) -> None:
    server.usage = False
    found, _ = measure(Load(server.url, ("x",), requests=1, n_tokens=3))
    assert found["tokens_counted_by"] == "chunks"
    assert found["tokens"] == 3
    assert found["prompt_tokens_per_second"] is None


def test_an_error_within_the_stream_is_a_failure(server: Server) -> None:
    server.break_stream = True
    with pytest.raises(BenchError, match="no request succeeded: the engine failed"):
        measure(Load(server.url, ("x",), requests=2, n_tokens=5))


def test_nobody_there() -> None:
    with pytest.raises(BenchError) as caught:
        measure(Load("http://127.0.0.1:9", ("x",)))
    assert caught.value.hint == "is the server running?"


@pytest.mark.parametrize("change", [{"url": "ftp://x"}, {"requests": 0}, {"concurrency": 0}, {"n_tokens": 0}])
def test_loads_that_make_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        measure(Load(**{"url": "http://127.0.0.1:9", "prompts": ("x",), **change}))
