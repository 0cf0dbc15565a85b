"""What the server costs: tokens a second and time to the first byte, served against the bare engine.

`python -m tests.server.overhead [--model M] [--tokens 200] [--rounds 8]` prints JSON. Both arms load the same model
with the same settings, not steering; they take turns, so that a busy machine slows both, and the medians are compared.
`cpu_us_per_token` is processor time, which other load changes little: of the processes, and of the event loop alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from expertd.engine.context import Context
from expertd.engine.conversations import Conversations
from expertd.engine.generate import Generation
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.requests import GenerationRequest, Piece, Sampling
from expertd.engine.settings import EngineSettings
from tests.server.soak import daemon

PROMPT = "Write about a mixture of experts and the sea. " * 4


class Bare:
    """The engine without service or server, not steering."""

    def __init__(self, model: Path, threads: int) -> None:
        settings = EngineSettings(
            model=model, n_ctx=512, threads=threads, threads_batch=threads, lazy_load=False, repack=True
        )
        start_backend()
        self._model = LoadedModel(settings)
        self._context = Context(self._model, settings, None)
        self._generation = Generation(self._context, Conversations(self._context, 0))

    def run(self, n: int) -> tuple[float, float]:
        """(tokens a second after the first, seconds to the first) of one generation."""
        prompt = tuple(self._model.tokenize(PROMPT, add_special=True, parse_special=True))
        request = GenerationRequest(prompt, n, Sampling(temperature=0), ignore_eos=True, cache_prompt=False)
        times, began = [], time.perf_counter()
        for event in self._generation.run(request):
            if isinstance(event, Piece) and event.tokens:
                times.append(time.perf_counter())
        return (len(times) - 1) / (times[-1] - times[0]), times[0] - began

    def close(self) -> None:
        self._context.close()
        self._model.close()


def served(http: httpx.Client, n: int) -> tuple[float, float]:
    """The same over HTTP, as a client sees it."""
    body = {
        "prompt": PROMPT, "max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True,
    }  # fmt: skip
    times, began = [], time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for chunk in answer.iter_raw():
            count = chunk.count(b'"text":') - chunk.count(b'"finish_reason":"')
            times += [time.perf_counter()] * count
    return (len(times) - 1) / (times[-1] - times[0]), times[0] - began


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Processor time of a process and of its main thread, which the event loop runs in."""
    tasks = {t.name: int((t / "schedstat").read_text().split()[0]) / 1e9 for t in Path(f"/proc/{pid}/task").iterdir()}
    return sum(tasks.values()), tasks[str(pid)]


@contextmanager
def bare(model: Path, threads: int) -> Iterator[Bare]:
    made = Bare(model, threads)
    try:
        yield made
    finally:
        made.close()


def compare(model: Path, n: int, rounds: int, threads: int) -> dict[str, Any]:
    """Medians of both arms, and the share that serving loses."""
    arms: dict[str, list[tuple[float, float]]] = {"bare": [], "served": []}
    extra = ["--steering", "off", "--threads", str(threads), "--set", f"engine.threads_batch={threads}"]
    with (
        tempfile.TemporaryDirectory() as directory,
        daemon(Path(directory), model, extra) as (process, url),
        httpx.Client(base_url=url, timeout=300) as http,
        bare(model, threads) as engine,
    ):
        engine.run(8), served(http, 8)
        spent = {"bare": 0.0, "served": 0.0, "loop": 0.0}
        for _ in range(rounds):
            before = time.process_time()
            arms["bare"].append(engine.run(n))
            spent["bare"] += time.process_time() - before
            before, loop_before = cpu_seconds(process.pid)
            arms["served"].append(served(http, n))
            after, loop_after = cpu_seconds(process.pid)
            spent["served"] += after - before
            spent["loop"] += loop_after - loop_before
    speed = {name: statistics.median(r[0] for r in runs) for name, runs in arms.items()}
    first = {name: statistics.median(r[1] for r in runs) for name, runs in arms.items()}
    return {
        "model": model.name,
        "rounds": rounds,
        "tokens": n,
        "tokens_per_second": {k: round(v, 2) for k, v in speed.items()},
        "lost_percent": round(100 * (1 - speed["served"] / speed["bare"]), 2),
        "first_token_ms": {k: round(v * 1000, 2) for k, v in first.items()},
        "cpu_us_per_token": {k: round(v / (n * rounds) * 1e6, 1) for k, v in spent.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("expertd/data/tiny-moe-q4_0.gguf"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(compare(given.model, given.tokens, given.rounds, given.threads), indent=2))


if __name__ == "__main__":
    main()
