"""Measures the first answer after a restart: with a saved profile, with none, and after `vmtouch -t` of the file.

`python -m expertd.bench.warmstart --size 1800MB --memory 900MB`: the built-in model inflated to the size, a daemon in a
memory cgroup of its own for each arm, from a cold page cache. Needs root. A first daemon teaches the profile on other
prompts of the topic. Prints JSON: for each arm seconds until ready, to the first token and for 32 tokens, tokens a
second of these and of later answers; and the warm-up's speed against reading as many bytes of the file in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from expertd.bench import inflate, pagecache
from expertd.bench.cgroup import MemoryGroup, memory_group
from expertd.errors import BenchError
from expertd.units import parse_size

_TEACH = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "class Tree:\n    def __init__(self, value):\n        self.value = value\n",
    "import os\nimport sys\n\nfor name in os.listdir(sys.argv[1]):\n",
    "def read_lines(path):\n    with open(path) as f:\n",
    "def main():\n    parser = argparse.ArgumentParser()\n",
)
_ASK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self"
_STEADY = (
    "def sort(items):\n    for i in range(len(items)):\n",
    "def count(words):\n    result = {}\n    for word in words:\n",
)
_TOKENS = 32
_BLOCK = 1 << 20
_READY_SECONDS = 180.0


@contextlib.contextmanager
def _daemon(model: Path, state: Path, group: MemoryGroup, words: Sequence[str]) -> Iterator[tuple[Any, float]]:
    """A client of a daemon in the group, and the seconds until it was ready."""
    import httpx

    socket = state / "admin.sock"
    command = [
        sys.executable, "-m", "expertd", "serve", "--model", str(model), "--steering", "on", "--port", "0", "--socket",
        str(socket), "--set", f"state.directory={state}", "--profile", "code", "--ctx", "1024", *words,
    ]  # fmt: skip
    began = time.perf_counter()
    with (state / "log").open("ab") as log:
        process = subprocess.Popen(group.command(command), stdout=log, stderr=log)
    try:
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=600) as http:
            while True:
                if process.poll() is not None or time.perf_counter() - began > _READY_SECONDS:
                    raise BenchError(f"the daemon did not start: {(state / 'log').read_text()[-400:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if http.get("/readyz").status_code == 200:
                        break
                time.sleep(0.01)
            yield http, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(60)


def _answer(http: Any, prompt: str, tokens: int = _TOKENS) -> dict[str, float]:
    """Seconds to the first token and to the last, seen from the client; tokens a second between."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "cache_prompt": False,
    }  # fmt: skip
    cost: dict[str, Any] = {}
    began, first, last = time.perf_counter(), 0.0, 0.0
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter() - began
                first = first or last
                cost = json.loads(line[6:]).get("expertd") or cost
    speed = (tokens - 1) / (last - first) if last > first else 0.0
    hits = cost["expert_hits"] / cost["expert_requests"] if cost.get("expert_requests") else 0.0
    return {"ttft_seconds": first, "seconds": last, "tokens_per_second": speed, "hit_ratio": hits,
            "bytes_read": cost.get("bytes_read", 0)}  # fmt: skip


def _arm(name: str, model: Path, state: Path, memory: int, budget: str) -> dict[str, Any]:
    pagecache.drop([model])
    words = ["--budget", budget]
    if name == "profile":
        words += ["--warm", "profile", "--set", "warm.ready_requires=warm"]
    with memory_group(memory) as group:
        began = time.perf_counter()
        if name == "vmtouch":
            subprocess.run(group.command(["vmtouch", "-q", "-t", str(model)]), check=True)
        touched = time.perf_counter() - began
        if name != "profile":
            words += ["--set", "profile.name=nobody"]
        with _daemon(model, state, group, words) as (http, ready):
            warmed = http.get("/expertd/warm").json()
            first = _answer(http, _ASK)
            steady = [_answer(http, p, 64) for p in (*_STEADY, *_STEADY)][-2:]
            budget_bytes = http.get("/expertd/cache").json()["budget_bytes"]
        speed = sum(s["tokens_per_second"] for s in steady) / len(steady)
        return {
            "arm": name, "before_seconds": touched, "ready_seconds": ready, "first": first,
            "budget_bytes": budget_bytes, "steady_tokens_per_second": speed, "warm": warmed,
            "oom_kills": group.oom_kills(),
        }  # fmt: skip


def _sequential(model: Path, nbytes: int, memory: int) -> float:
    """Bytes a second of a plain read in order, in a group of the same size."""
    pagecache.drop([model])
    script = (
        "import os,sys,time\nfd=os.open(sys.argv[1],os.O_RDONLY)\nleft=int(sys.argv[2]);t=time.perf_counter()\n"
        f"b=bytearray({_BLOCK})\nwhile left>0:\n n=os.readv(fd,[b])\n if not n: break\n left-=n\n"
        "print(time.perf_counter()-t)"
    )
    with memory_group(memory) as group:
        done = subprocess.run(
            group.command([sys.executable, "-c", script, str(model), str(nbytes)]),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return nbytes / float(done.stdout)


def measure(model: Path, state: Path, memory: int, budget: str, arms: Sequence[str], runs: int) -> dict[str, Any]:
    """All of it. BenchError without root or a cgroup."""
    pagecache.drop([model])
    with memory_group(memory) as group, _daemon(model, state, group, ["--budget", budget]) as (http, _):
        for prompt in _TEACH:
            _answer(http, prompt, 48)
    rows = [_arm(name, model, state, memory, budget) for _ in range(runs) for name in arms]
    warm = [r["warm"] for r in rows if r["arm"] == "profile"]
    read = warm[-1]["read_bytes"] if warm else 0
    return {
        "model_bytes": model.stat().st_size, "memory_bytes": memory, "arms": rows,
        "warm_bytes_per_second": [w["bytes_per_second"] for w in warm],
        "sequential_bytes_per_second": [_sequential(model, read, memory) for _ in range(runs)] if read else [],
    }  # fmt: skip


@click.command()
@click.option("--size", default="1800MB", show_default=True, help="Size of the inflated model.")
@click.option("--memory", default="900MB", show_default=True, help="Limit of each arm's cgroup.")
@click.option("--budget", default="auto", show_default=True, help="As for `expertd serve`.")
@click.option("--arms", default="none,profile,vmtouch", show_default=True)
@click.option("--runs", default=1, show_default=True, help="Times each arm is run.")
@click.option("--work", type=click.Path(path_type=Path), help="Where the model is kept; else it is made and removed.")
def main(size: str, memory: str, budget: str, arms: str, runs: int, work: Path | None) -> None:
    """First answers after a restart, arm by arm, as JSON."""
    wanted = arms.split(",")
    if "vmtouch" in wanted and shutil.which("vmtouch") is None:
        raise click.UsageError("vmtouch is not installed: apt-get install vmtouch, or leave the arm out")
    with tempfile.TemporaryDirectory(prefix="expertd-warmstart-", dir=work or os.environ.get("TMPDIR")) as directory:
        plan = inflate.plan(parse_size(size))
        model = (work or Path(directory)) / plan.file_name()
        inflate.write(plan, model)
        found = measure(model, Path(directory), parse_size(memory), budget, wanted, runs)
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
