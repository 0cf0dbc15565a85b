"""Whether decoding is slower while somebody looks on: `python -m tests.dashboard.slowdown [--pairs 20]` prints JSON.

One daemon on a model of 94 layers x 128 experts with a budget that makes experts come and go. The same answer is asked
for again and again, in pairs: once with nobody looking, once with a viewer that asks for what the page asks for, once a
second, in another process; which of the two comes first alternates. No browser: its drawing would take a core from the
daemon where both run on one small machine, and is not what a page elsewhere costs.

Tokens a second are by the clock and are disturbed by other work on the machine; the processor time of the engine's
thread for a token is not. The difference is the median over pairs, its spread the middle half of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.dashboard.cost import URL, daemon

_TOKENS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    alone: list[tuple[float, float]] = []
    viewed: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as pid:
        engine = engine_thread(pid)
        for _ in range(2):
            answer(engine)
        for pair in range(pairs):
            for looked_at in (pair % 2 == 1, pair % 2 == 0):
                with viewer() if looked_at else contextlib.nullcontext():
                    (viewed if looked_at else alone).append(answer(engine))
    found = {"pairs": pairs, "load_average": os.getloadavg()[0]}
    for index, what in enumerate(("tokens_per_second", "engine_cpu_ms_per_token")):
        changes = [100 * (v[index] / a[index] - 1) for a, v in zip(alone, viewed, strict=True)]
        low, middle, high = statistics.quantiles(changes, n=4)
        found[what] = {
            "alone": round(statistics.median(a[index] for a in alone), 3),
            "viewed": round(statistics.median(v[index] for v in viewed), 3),
            "change_percent": round(middle, 2),
            "middle_half_percent": [round(low, 2), round(high, 2)],
        }
    print(json.dumps(found, indent=1))


def engine_thread(pid: int) -> Path:
    """The schedstat of the thread that computes: the one that uses most processor time for an answer."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    before = {t: _cpu_seconds(t / "schedstat") for t in tasks}
    ask()
    return max(tasks, key=lambda t: _cpu_seconds(t / "schedstat") - before[t]) / "schedstat"


def _cpu_seconds(schedstat: Path) -> float:
    """0 for a thread that has ended."""
    with contextlib.suppress(OSError):
        return int(schedstat.read_text().split()[0]) / 1e9
    return 0.0


def ask() -> dict[str, Any]:
    body = {
        "prompt": "the same words", "max_tokens": _TOKENS, "ignore_eos": True, "temperature": 2.0, "seed": 5,
        "cache_prompt": False,
    }  # fmt: skip
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def answer(engine: Path) -> tuple[float, float]:
    """Tokens a second while decoding, and the engine's processor milliseconds a token (prompt included)."""
    before = _cpu_seconds(engine)
    timings = ask()["timings"]
    return timings["predicted_per_second"], 1000 * (_cpu_seconds(engine) - before) / _TOKENS


@contextlib.contextmanager
def viewer() -> Iterator[None]:
    """Asks as the page does: the figures since the last look, and the map unless it is what it was."""
    end = threading.Event()

    def look() -> None:
        last, tag = 0, ""
        while not end.is_set():
            with urllib.request.urlopen(f"{URL}/expertd/series?since={last}") as reply:
                last = json.load(reply)["last"]
            heat = urllib.request.Request(f"{URL}/expertd/heatmap", headers={"Accept": "application/octet-stream"})
            if tag:
                heat.add_header("If-None-Match", tag)
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(heat) as reply:
                reply.read()
                tag = reply.headers["ETag"]
            end.wait(1.0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


if __name__ == "__main__":
    main()
