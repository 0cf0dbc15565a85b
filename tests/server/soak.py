"""A soak: many requests of all kinds, many of them dropped at random, against a daemon in a process of its own (with
one thread for the model, so that a busy machine slows it no more than its share).

`python -m tests.server.soak --requests 2000` prints what it found as JSON. The daemon must end where it began: memory,
descriptors and threads flat, nothing running or waiting, counters that add up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = [
    "What is the capital of France?",
    "What is a mixture of experts?",
    "Who are you?",
    "Write a poem.",
    "¿Qué?",
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
WORKERS = 6
Process = subprocess.Popen[bytes]


STEERED = ["--steering", "on", "--budget", "50%", "--threads", "1", "--set", "engine.threads_batch=1"]


@contextlib.contextmanager
def daemon(
    directory: Path, model: Path, flags: Sequence[str] = STEERED
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A serving daemon and its URL."""
    socket = directory / "admin.sock"
    command = [
        sys.executable, "-m", "expertd", "serve", "--model", str(model), "--ctx", "512", "--port", "0",
        "--socket", str(socket), "--set", f"state.directory={directory}", "--set", "server.max_queue=8",
        "--set", "engine.prompt_cache=8MiB", *flags,
    ]  # fmt: skip
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://localhost") as http:
            for _ in range(600):
                with contextlib.suppress(httpx.HTTPError):
                    status = http.get("/expertd/status").json()
                    if status["state"] == "ready":
                        break
                assert process.poll() is None, (directory / "log").read_text()
                time.sleep(0.1)
        yield process, status["url"]
    finally:
        process.terminate()
        process.wait(20)


def one_request(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": dice.choice(QUESTIONS) * dice.randint(1, 5)}],
        "max_tokens": dice.randint(1, 24),
        "temperature": dice.choice([0, 0.8, 1.5]),
        "stream": dice.random() < 0.6,
    }
    extra: list[dict[str, Any]] = [
        {}, {}, {"stop": ["e", "."]}, {"logprobs": True, "top_logprobs": 2}, {"return_progress": True},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"tools": [TOOL], "tool_choice": "required"}, {"stream_options": {"include_usage": True}},
        {"temperature": 99999}, {"grammar": "broken ::="}, {"cache_prompt": False},
    ]  # fmt: skip
    kind = dice.random()
    if kind < 0.6:
        return "/v1/chat/completions", ask | dice.choice(extra)
    if kind < 0.7:
        return "/v1/messages", ask
    if kind < 0.8:
        return "/v1/responses", {"input": ask["messages"], "max_output_tokens": 8, "stream": ask["stream"]}
    if kind < 0.9:
        return "/v1/completions", {"prompt": "The " * dice.randint(1, 600), "max_tokens": 8, "stream": ask["stream"]}
    return dice.choice(["/tokenize", "/expertd/cache", "/metrics", "/health", "/slots", "/nowhere"]), {"content": "x"}


async def exchange(http: httpx.AsyncClient, dice: random.Random) -> str:
    """One exchange; how it ended: a status, or dropped."""
    path, body = one_request(dice)
    method = "POST" if path.startswith("/v1") or path == "/tokenize" else "GET"
    patience = dice.choice([None, None, None, None, None, 0.005, 0.02, 0.08])
    lines = dice.choice([None, None, None, 1, 3, 6])
    try:
        async with asyncio.timeout(patience), http.stream(method, path, json=body) as answer:
            n = 0
            async for _ in answer.aiter_lines():
                n += 1
                if lines is not None and n >= lines and body.get("stream"):
                    return "dropped"
            return str(answer.status_code)
    except TimeoutError:
        return "dropped"


async def storm(url: str, n: int, seed: int) -> Counter[str]:
    """`n` exchanges by a few workers, each dropped one on a connection of its own."""
    found: Counter[str] = Counter()

    async def work(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(n // WORKERS):
                found[await exchange(http, dice)] += 1

    await asyncio.gather(*(work(i) for i in range(WORKERS)))
    return found


def footprint(pid: int) -> dict[str, int]:
    """Anonymous memory in KiB, descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def settled(url: str) -> dict[str, float]:
    """The counters, once nothing runs or waits."""
    with httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(300):
            if not any(s["is_processing"] for s in http.get("/slots").json()):
                break
            time.sleep(0.1)
        rows = [line.split() for line in http.get("/metrics").text.splitlines() if line and line[0] != "#"]
        return {row[0]: float(row[-1]) for row in rows}


def errors_in(log: Path) -> list[str]:
    """Errors with what follows them in the log, less llama.cpp's own words for a cancelled graph."""
    lines, found = log.read_text().splitlines(), []
    for i, line in enumerate(lines):
        if " ERROR " in line and " llama: " not in line:
            found += [line, *(x for x in lines[i + 1 : i + 60] if x.startswith("  "))]
    return found


def soak(model: Path, n: int, seed: int = 1) -> dict[str, Any]:
    """Warms up with a fifth, then `n` exchanges in four parts; what was found."""
    with tempfile.TemporaryDirectory() as directory, daemon(Path(directory), model) as (process, url):
        asyncio.run(storm(url, max(60, n // 5), seed))
        settled(url)
        began, ends, footprints = time.monotonic(), Counter[str](), [footprint(process.pid)]
        for part in range(4):
            ends += asyncio.run(storm(url, n // 4, seed + 1 + part))
            metrics = settled(url)
            footprints.append(footprint(process.pid))
        seconds = time.monotonic() - began
        hits, misses = (metrics[f'expertd_cache_requests_total{{result="{r}"}}'] for r in ("hit", "miss"))
        layers = sum(v for k, v in metrics.items() if k.startswith("expertd_cache_layer_requests_total"))
        return {
            "requests": sum(ends.values()),
            "seconds": round(seconds, 1),
            "ends": dict(sorted(ends.items())),
            "footprints": footprints,
            "in_flight": metrics["expertd_requests_in_flight"],
            "queued": metrics["expertd_requests_queued"],
            "expert_requests": hits + misses,
            "expert_requests_by_layer": layers,
            "log_errors": errors_in(Path(directory) / "log"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=Path("expertd/data/tiny-moe-q4_0.gguf"))
    arguments = parser.parse_args()
    print(json.dumps(soak(arguments.model, arguments.requests, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
