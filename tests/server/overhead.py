"""What the server costs: tokens a second and time to the first byte, served against the bare engine and, where its
program is given, against llama-server.

`python -m tests.server.overhead [--model M] [--tokens 200] [--rounds 8] [--llama-server PROGRAM]` prints JSON. All arms
load the same model with the same settings, not steering; they take turns, so that a busy machine slows all, and the
medians are compared. `cpu_us_per_token` is processor time, which other load changes little: of the processes, and of
the event loop alone. llama-server can be built from the sources that llama-cpp-python's source package brings along.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
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


@contextmanager
def llama_server(program: Path, model: Path, threads: int) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """llama.cpp's own server, one slot, as it comes; and a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(program), "-m", str(model), "-c", "512", "-np", "1", "-t", str(threads), "-tb", str(threads),
        "--host", "127.0.0.1", "--port", str(port), "--offline",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            for _ in range(600):
                with suppress(httpx.HTTPError):
                    if http.get("/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield process, http
    finally:
        process.terminate()
        process.wait(30)


def compare(model: Path, n: int, rounds: int, threads: int, program: Path | None = None) -> dict[str, Any]:
    """Medians of the arms, and the share that serving loses."""
    arms: dict[str, list[tuple[float, float]]] = {"bare": [], "served": []}
    extra = ["--steering", "off", "--threads", str(threads), "--set", f"engine.threads_batch={threads}"]
    with (
        tempfile.TemporaryDirectory() as directory,
        daemon(Path(directory), model, extra) as (process, url),
        httpx.Client(base_url=url, timeout=300) as http,
        bare(model, threads) as engine,
        llama_server(program, model, threads) if program else nullcontext() as other,
    ):
        engine.run(8), served(http, 8)
        spent = {"bare": 0.0, "served": 0.0, "loop": 0.0}
        if other:
            served(other[1], 8)
            arms["llama-server"], spent["llama-server"] = [], 0.0

        def bare_arm() -> None:
            before = time.process_time()
            arms["bare"].append(engine.run(n))
            spent["bare"] += time.process_time() - before

        def served_arm() -> None:
            before, loop_before = cpu_seconds(process.pid)
            arms["served"].append(served(http, n))
            after, loop_after = cpu_seconds(process.pid)
            spent["served"] += after - before
            spent["loop"] += loop_after - loop_before

        def other_arm() -> None:
            if other:
                before, _ = cpu_seconds(other[0].pid)
                arms["llama-server"].append(served(other[1], n))
                spent["llama-server"] += cpu_seconds(other[0].pid)[0] - before

        turns: list[Callable[[], None]] = [bare_arm, served_arm, other_arm]
        for _ in range(rounds):
            for arm in turns:
                arm()
            turns.append(turns.pop(0))
    speed = {name: statistics.median(r[0] for r in runs) for name, runs in arms.items()}
    first = {name: statistics.median(r[1] for r in runs) for name, runs in arms.items()}
    return {
        "model": model.name,
        "rounds": rounds,
        "tokens": n,
        "tokens_per_second": {k: round(v, 2) for k, v in speed.items()},
        "lost_percent": {k: round(100 * (1 - v / speed["bare"]), 2) for k, v in speed.items() if k != "bare"},
        "first_token_ms": {k: round(v * 1000, 2) for k, v in first.items()},
        "cpu_us_per_token": {k: round(v / (n * rounds) * 1e6, 1) for k, v in spent.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("expertd/data/tiny-moe-q4_0.gguf"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    given = parser.parse_args()
    found = compare(given.model, given.tokens, given.rounds, given.threads, given.llama_server)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
