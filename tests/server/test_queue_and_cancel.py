"""S1 and S2 over real sockets on the real model: who waits, who is refused, who goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertd.runtime.service import Service
from tests.server.conftest import LiveServer, runtime_settings
from tests.server.test_exchange import until

Start = Callable[..., LiveServer]
QUESTIONS = [
    "What is the capital of France?", "What is a mixture of experts?", "Tell me about the sea.", "What is Python?",
    "Who are you?", "Count to ten.", "What is a router?", "Write a poem.",
]  # fmt: skip


def body(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48, **fields}


def text_of(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_eight_at_once_with_a_queue_of_four(demo_model: Path, start_server: Start) -> None:
    server = start_server(Service(runtime_settings(demo_model, max_queue=4)))
    with server.client() as http:
        alone = {q: text_of(http.post("/v1/chat/completions", json=body(q))) for q in QUESTIONS}
    order: list[str] = []

    async def ask(http: httpx.AsyncClient, question: str) -> httpx.Response:
        answer = await http.post("/v1/chat/completions", json=body(question))
        if answer.status_code == 200:
            order.append(question)
        return answer

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            tasks = []
            for question in QUESTIONS:
                tasks.append(asyncio.create_task(ask(http, question)))
                known = len(tasks)
                for _ in range(200):  # the requests arrive in this order
                    if server.service.queued + server.service.running >= min(known, 5):
                        break
                    await asyncio.sleep(0.002)
            return await asyncio.gather(*tasks)

    answers = dict(zip(QUESTIONS, asyncio.run(all_at_once()), strict=True))
    served = [q for q, a in answers.items() if a.status_code == 200]
    refused = [a for a in answers.values() if a.status_code != 200]
    assert refused, "eight are more than one that runs and four that wait"
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert order == served, "in order of arrival"
    assert len(served) >= 5
    assert {q: text_of(answers[q]) for q in served} == {q: alone[q] for q in served}
    assert server.service.stats.rejected == len(refused)


def test_a_dropped_stream_stops_and_the_next_completes(demo_model: Path, start_server: Start) -> None:
    service = Service(runtime_settings(demo_model))
    server = start_server(service)
    with server.client() as http:
        expected = text_of(http.post("/v1/chat/completions", json=body(QUESTIONS[0])))

        async def run() -> tuple[httpx.Response, int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as a:
                endless = body(QUESTIONS[1], stream=True, max_tokens=-1, ignore_eos=True)
                async with a.stream("POST", "/v1/chat/completions", json=endless) as stream:
                    chunks = 0
                    other = None
                    async for line in stream.aiter_lines():
                        chunks += line.startswith("data: ")
                        if chunks == 3:
                            other = asyncio.create_task(a.post("/v1/chat/completions", json=body(QUESTIONS[0])))
                            await asyncio.sleep(0.02)
                            break
                assert other is not None
                healthy = 0
                while not other.done():
                    healthy += (await a.get("/health")).status_code == 200
                return await other, healthy

        answer, healthy = asyncio.run(run())
        assert text_of(answer) == expected
        assert healthy > 0, "health answers while another request runs"
        until(lambda: service.stats.cancelled == 1)
        assert not service.running
        assert service.stats.generated_tokens < 200, "the dropped stream would have filled the context"


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_can_go_too(demo_model: Path, start_server: Start, stream: bool) -> None:
    service = Service(runtime_settings(demo_model))
    server = start_server(service)
    held = json.dumps(body(QUESTIONS[1], stream=True, max_tokens=-1, ignore_eos=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(held)}\r\n\r\n".encode()
    with server.connect() as runs:
        runs.sendall(head + held)
        until(lambda: service.running)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                server.url + "/v1/chat/completions", json=body(QUESTIONS[0], stream=stream),
                timeout=httpx.Timeout(10, read=0.15),
            )  # fmt: skip
    until(lambda: service.queued == 0 and not service.running)


def test_positions_are_told(demo_model: Path, start_server: Start) -> None:
    server = start_server(Service(runtime_settings(demo_model)))

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as a:
            first = asyncio.create_task(a.post("/v1/chat/completions", json=body(QUESTIONS[1], ignore_eos=True)))
            while not server.service.running:
                await asyncio.sleep(0.002)
            rest = [
                asyncio.create_task(a.post("/v1/chat/completions", json=body(q, stream=True))) for q in QUESTIONS[2:4]
            ]
            await first
            return [(await r).text for r in rest]

    texts = asyncio.run(run())
    told = [line for text in texts for line in text.splitlines() if line.startswith(": queued")]
    assert ": queued position=1" in told
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
