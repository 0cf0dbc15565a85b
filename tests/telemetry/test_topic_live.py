"""A topic that changes under a real daemon, and its verdict names it.

First a text that goes round in a few words, which few experts serve, until that is what is usual; then other texts with
the same budget. The disk, the limits and the daemon are those of `test_causes`; the same on a clock that is told the
time, with the passing of the change, is in `test_topic_change`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from expertd.bench.pagecache import drop
from tests.telemetry.test_causes import PROMPTS, Daemon, daemon, model

__all__ = ["model"]
pytestmark = [pytest.mark.root, pytest.mark.slow]

_ROUND = "one two three one two three"


def narrow(d: Daemon, tokens: int) -> None:
    """An answer of the words of its prompt and no others."""
    with urllib.request.urlopen(f"{d.url}/expertd/status", timeout=60) as answer:
        assert json.load(answer)["state"] == "ready"
    body: dict[str, Any] = {
        "prompt": _ROUND, "max_tokens": tokens, "temperature": 0, "cache_prompt": False,
        "grammar": 'root ::= (" one two three")+', "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{d.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def evicted(d: Daemon) -> int:
    found: int = d.get("/expertd/cache")["evictions"]
    return found


def test_the_topic_changes(model: Path, tmp_path: Path) -> None:
    drop([model])
    with daemon(model, tmp_path, "--steering", "on", "--budget", "15%") as d:
        for turn in range(40):  # the cache is full before anything is usual
            d.complete(PROMPTS[turn % len(PROMPTS)], 8)
            if evicted(d):
                break
        narrow(d, 450)
        before = d.get("/expertd/status")["verdict"]
        end, turn = time.monotonic() + 30, 0
        found = before
        while found["cause"] != "topic" and time.monotonic() < end:
            d.complete(PROMPTS[turn % len(PROMPTS)], 40)
            found, turn = d.verdict(), turn + 1
    if found["cause"] in ("contention", "pressure") or found["figures"].get("io_share", 0.0) < 0.4:
        pytest.skip(f"this machine is too busy, or its disk too fast, to show it: {found['sentence']}")
    assert found["cause"] == "topic", (before, found)
    assert "usual" in found["sentence"]
    assert before["cause"] != "topic"
