"""Measures any server that speaks OpenAI's API: time to the first token, prompt and decode speed, under load.

Requests are streamed. Tokens are counted by the server's own `usage`, else by its chunks, and which of the two it was
is told. Each request starts with a line of its own, so that a prompt cache does not answer for the model.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from expertd.bench.results import percentile
from expertd.errors import BenchError, UsageError

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. `prompts` are taken in turn; `model` "" asks the server which it has; `same` leaves the prompts as
    they are instead of telling them apart."""

    url: str
    prompts: tuple[str, ...]
    requests: int = 8
    concurrency: int = 1
    n_tokens: int = 64
    api: str = "chat"
    model: str = ""
    api_key: str = ""
    same: bool = False
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds count from its start; `gaps` lie between pieces after the first. `error` "" is success."""

    started: float
    ttft_seconds: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    pieces: int = 0
    gaps: tuple[float, ...] = ()
    counted: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def decode_per_second(self) -> float | None:
        """Tokens a second after the first."""
        span = self.seconds - self.ttft_seconds
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else None

    @property
    def prompt_per_second(self) -> float | None:
        """Prompt tokens a second as the client sees it: waiting included, those cached left out."""
        fresh = self.prompt_tokens - self.cached_tokens
        return fresh / self.ttft_seconds if fresh > 0 and self.ttft_seconds > 0 else None


async def run(load: Load, done: Callable[[Answer], None]) -> tuple[str, list[Answer]]:
    """Send it all; returns the model's name and the answers in the order in which they ended.

    Raises UsageError for a load that makes no sense, BenchError when the server cannot be reached or no request
    succeeds.
    """
    _check(load)
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency + 1)
    # trust_env off: a proxy of the environment would be measured along with the server.
    async with httpx.AsyncClient(
        base_url=_base(load.url), headers=headers, timeout=load.timeout_seconds, limits=limits, trust_env=False
    ) as client:
        model = load.model or await _ask_model(client, load.url)
        answers: list[Answer] = []
        numbers = iter(range(load.requests))

        async def worker() -> None:
            for number in numbers:
                answer = await _one(client, load, model, number)
                answers.append(answer)
                done(answer)

        await asyncio.gather(*(worker() for _ in range(min(load.concurrency, load.requests))))
    if all(a.error for a in answers):
        raise BenchError(f"{load.url}: no request succeeded: {answers[0].error}")
    return model, answers


def _check(load: Load) -> None:
    if not load.url.startswith(("http://", "https://")):
        raise UsageError(f"{load.url!r} is no http URL", hint="for example http://127.0.0.1:8642")
    if load.requests < 1 or load.concurrency < 1 or load.n_tokens < 1:
        raise UsageError("requests, concurrency and tokens are at least 1")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


async def _ask_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        reply = await client.get("/v1/models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPStatusError as e:
        raise BenchError(f"{url}: /v1/models answered {e.response.status_code}", hint="give --model, or a key") from e
    except httpx.HTTPError as e:
        raise BenchError(f"{url}: {e or type(e).__name__}", hint="is the server running?") from e
    except (ValueError, LookupError, TypeError) as e:
        raise BenchError(f"{url}: /v1/models names no model", hint="give --model") from e


async def _one(client: httpx.AsyncClient, load: Load, model: str, number: int) -> Answer:
    started = time.perf_counter()
    clock = _Clock(started)
    try:
        async with client.stream("POST", _PATHS[load.api], json=_body(load, model, number)) as reply:
            if reply.status_code != 200:
                return Answer(started, error=_reason(reply.status_code, await reply.aread()))
            async for event in _events(reply):
                clock.see(event)
    except httpx.HTTPError as e:
        return Answer(started, error=f"{type(e).__name__}: {e}".rstrip(": "))
    return clock.answer()


def _body(load: Load, model: str, number: int) -> dict[str, Any]:
    text = load.prompts[number % len(load.prompts)]
    if not load.same:
        text = f"({number + 1}) {text}"
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": load.n_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Beyond the standard, and ignored where unknown: answers of one length make speeds comparable.
        "ignore_eos": True,
    }
    if load.api == "chat":
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": text}


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


class _Clock:
    """Takes the time of one stream's pieces."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._first = self._last = 0.0
        self._gaps: list[float] = []
        self._pieces = 0
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, float] = {}
        self._error = ""

    def see(self, event: dict[str, Any]) -> None:
        """One event of the stream, now."""
        if event.get("error"):
            error = event["error"]
            self._error = str(error.get("message", error) if isinstance(error, dict) else error)
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings
        if any(_text(choice) for choice in event.get("choices") or ()):
            now = time.perf_counter()
            if self._pieces:
                self._gaps.append(now - self._last)
            else:
                self._first = now
            self._last = now
            self._pieces += 1

    def answer(self) -> Answer:
        """What it came to."""
        if not self._pieces:
            return Answer(self._started, error=self._error or "the stream held no text")
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            started=self._started,
            ttft_seconds=self._first - self._started,
            seconds=self._last - self._started,
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            tokens=int(self._usage.get("completion_tokens") or self._pieces),
            pieces=self._pieces,
            gaps=tuple(self._gaps),
            counted="completion_tokens" in self._usage,
            timings={k: float(v) for k, v in self._timings.items() if isinstance(v, (int, float))},
            error=self._error,
        )


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _reason(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:200]
    return f"status {status}: {message}"


def summarise(load: Load, model: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The JSON of `bench http`. Speeds a second; None where the server told no token counts."""
    good = [a for a in answers if not a.error]
    first = min(a.started for a in answers)
    span = max((a.started + a.seconds for a in good), default=first) - first
    return {
        "url": load.url,
        "model": model,
        "api": load.api,
        "requests": len(answers),
        "concurrency": load.concurrency,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "errors": dict(Counter(a.error for a in answers if a.error)),
        "tokens_counted_by": "usage" if all(a.counted for a in good) else "chunks",
        "prompt_tokens": sum(a.prompt_tokens for a in good),
        "cached_tokens": sum(a.cached_tokens for a in good),
        "tokens": sum(a.tokens for a in good),
        "ttft_seconds": _spread([a.ttft_seconds for a in good]),
        "inter_token_seconds": _spread([g for a in good for g in a.gaps]),
        "prompt_tokens_per_second": _median(a.prompt_per_second for a in good),
        "decode_tokens_per_second": _median(a.decode_per_second for a in good),
        "total_tokens_per_second": sum(a.tokens for a in good) / span if span > 0 else None,
        "server_prompt_per_second": _median(a.timings.get("prompt_per_second") for a in good),
        "server_predicted_per_second": _median(a.timings.get("predicted_per_second") for a in good),
        "answers": list(answers),
    }


def _median(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    shares = {f"p{share}": percentile(ordered, share) for share in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **shares, "max": ordered[-1]}
