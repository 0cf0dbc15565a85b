"""S1 to its end, on a daemon in a process of its own: a dropped stream, health throughout, SIGTERM while it works."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.server.soak import daemon

LONG = "<|im_start|>user\n" + "Tell me all about it. " * 60


def endless(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": -1, "ignore_eos": True, "stream": True, "cache_prompt": False}


async def drop_while_another_prompts(url: str) -> tuple[str, int]:
    """The other's finish reason, and how often health answered meanwhile."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        async with http.stream("POST", "/v1/completions", json=endless("Once")) as stream:
            chunks = 0
            async for line in stream.aiter_lines():
                chunks += line.startswith("data: ")
                if chunks == 3:
                    break
            body = {"prompt": LONG, "max_tokens": 8, "cache_prompt": False}
            other = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.sleep(0.01)
        healthy = 0
        while not other.done():
            healthy += (await http.get("/health")).status_code == 200
        return (await other).json()["choices"][0]["finish_reason"], healthy


async def stop_while_it_works(url: str, pid: int) -> list[str]:
    """Sends SIGTERM within a stream while another waits; the lines that still came."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        waiting = None
        lines: list[str] = []
        async with http.stream("POST", "/v1/completions", json=endless("Once")) as stream:
            async for line in stream.aiter_lines():
                lines.append(line)
                if line.startswith("data: ") and waiting is None:
                    waiting = asyncio.create_task(http.post("/v1/completions", json=endless("Twice")))
                    await asyncio.sleep(0.05)
                    os.kill(pid, signal.SIGTERM)
        assert waiting is not None
        lines += (await waiting).text.splitlines()
        return lines


def test_s1(demo_model: Path, tmp_path: Path) -> None:
    # The budget makes each token slow enough that neither stream is over before the signal.
    flags = ["--steering", "on", "--budget", "1MiB", "--threads", "1", "--set", "server.drain_seconds=1"]
    with daemon(tmp_path, demo_model, flags) as (process, url):
        reason, healthy = asyncio.run(drop_while_another_prompts(url))
        assert reason == "length"
        assert healthy > 0
        lines = asyncio.run(stop_while_it_works(url, process.pid))
        assert process.wait(10) == 0
    told = [x for x in lines if '"error"' in x]
    assert len([x for x in lines if x == "data: [DONE]"]) + len(told) == 2, "each ends with its end or an error"
    assert told, "what could not end in time is told"
    assert not (tmp_path / "admin.sock").exists()
    assert "stopped in" in (tmp_path / "log").read_text()
