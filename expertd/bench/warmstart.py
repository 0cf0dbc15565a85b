"""Measures the first answer after a restart: with a saved profile, with none, after `vmtouch -t` of the file, and after
a rehearsal; and the speed of a warm-up.

`python -m expertd.bench.warmstart --size 1800MB --memory 900MB --read-ahead 128 --runs 3`: the built-in model inflated
to the size, a daemon in a memory cgroup of its own for each arm, from a cold page cache. Needs root. Each run takes all
arms, each time beginning with another one:

- none: nothing is known; the daemon as it starts without a saved profile.
- profile: ready once the experts are warm of a profile that other prompts of the topic have taught before.
- vmtouch: `vmtouch -t` reads the file in the arm's group before a daemon starts that knows nothing.
- rehearsed: `/expertd/rehearse` runs the prompt before it is asked.

An arm's first answer is asked at once; its steady figures are the median of asking the same another five times. After
the arms `expertd warm` without a daemon takes turns with reading as many bytes of the same file in order, through the
page cache (as fast as read-ahead is set) and past it (as fast as the disk is); the faster of the two is what warming is
compared with.
Prints JSON. What is compared is the caller's to say; medians are in `summary`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from expertd.bench import inflate, pagecache
from expertd.bench.cgroup import MemoryGroup, memory_group
from expertd.bench.readahead import read_ahead
from expertd.errors import BenchError
from expertd.pages.disk import read_limits
from expertd.units import parse_size

_TEACH = (
    "Tell me a story about a dog.",
    "Tell me a story about the forest.",
    "Write a story about a house and a horse.",
    "Tell me about a child who found a stone.",
    "Write a python class for a stack.",
)
_ASK = "Tell me a story about the sea."
"""Its answer is longer than what is asked of it: what a rehearsal learns is then what is measured."""
ARMS = ("none", "profile", "vmtouch", "rehearsed")
_TOKENS = 32
_AGAIN = 5
_BLOCK = 4 << 20
_READY_SECONDS = 180.0
_READ = f"""
import mmap, os, sys, time
direct = os.O_DIRECT if sys.argv[3] == "direct" else 0
fd, left, block = os.open(sys.argv[1], os.O_RDONLY | direct), int(sys.argv[2]), mmap.mmap(-1, {_BLOCK})
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
began = time.perf_counter()
while left > 0 and (n := os.readv(fd, [block])):
    left -= n
print(time.perf_counter() - began)
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured. `memory` bounds each arm in bytes, `taught` is a state directory with the profile `stories`."""

    model: Path
    work: Path
    memory: int
    budget: str
    taught: Path


@contextlib.contextmanager
def _daemon(job: Job, state: Path, group: MemoryGroup, words: Sequence[str]) -> Iterator[tuple[Any, float]]:
    """A client of a daemon in the group, and the seconds until it was ready."""
    import httpx

    socket = state / "admin.sock"
    command = [
        sys.executable, "-m", "expertd", "serve", "--model", str(job.model), "--steering", "on", "--port", "0",
        "--socket", str(socket), "--set", f"state.directory={state}", "--ctx", "1024", "--budget", job.budget, *words,
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
    """Seconds to the first token and to the last, seen from the client; tokens a second between; what it cost."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, "stream": True,
        "cache_prompt": False,
    }  # fmt: skip
    cost: dict[str, Any] = {}
    count = tokens
    began, first, last = time.perf_counter(), 0.0, 0.0
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            cost = chunk.get("expertd") or cost
            count = chunk.get("timings", {}).get("predicted_n", count)
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                last = time.perf_counter() - began
                first = first or last
    if not first:
        raise BenchError("the model said nothing")
    speed = (count - 1) / (last - first) if last > first else 0.0
    hits = cost["expert_hits"] / cost["expert_requests"] if cost.get("expert_requests") else 0.0
    return {
        "ttft_seconds": first, "seconds": last, "tokens_per_second": speed, "hit_ratio": hits,
        "bytes_read": cost.get("bytes_read", 0), "major_faults": cost.get("major_faults", 0),
    }  # fmt: skip


def _teach(job: Job) -> None:
    pagecache.drop([job.model])
    with memory_group(job.memory) as group, _daemon(job, job.taught, group, ["--profile", "stories"]) as (http, _):
        for prompt in _TEACH:
            _answer(http, prompt, 48)


def _arm(name: str, job: Job) -> dict[str, Any]:
    """One arm from a cold page cache, in a state directory of its own."""
    pagecache.drop([job.model])
    with tempfile.TemporaryDirectory(dir=job.work) as directory, memory_group(job.memory) as group:
        state, words = Path(directory), []
        if name == "profile":
            shutil.copytree(job.taught / "profiles", state / "profiles")
            words = ["--profile", "stories", "--warm", "profile", "--set", "warm.ready_requires=warm"]
        began = time.perf_counter()
        if name == "vmtouch":
            subprocess.run(group.command(["vmtouch", "-q", "-t", str(job.model)]), check=True)
        touched = time.perf_counter() - began
        with _daemon(job, state, group, words) as (http, ready):
            if name == "rehearsed":
                order = {"prompts": [_ASK], "profile": "demo", "max_tokens": _TOKENS}
                http.post("/expertd/rehearse", json=order).raise_for_status()
            warmed = http.get("/expertd/warm").json()
            first, *again = [_answer(http, _ASK) for _ in range(1 + _AGAIN)]
            budget = http.get("/expertd/cache").json()["budget_bytes"]
        return {
            "arm": name, "before_seconds": touched, "ready_seconds": ready, "first": first, "again": again,
            "budget_bytes": budget, "warm": warmed, "oom_kills": group.oom_kills(),
        }  # fmt: skip


def _speeds(job: Job) -> dict[str, float]:
    """Bytes a second of a warm-up and of reads of as many bytes, each from a cold cache in a fresh group."""
    pagecache.drop([job.model])
    words = ["warm", str(job.model), "--local", "--budget", str(job.memory * 2 // 3), "--json"]
    with memory_group(job.memory) as group:
        warmed = json.loads(_output(group, [sys.executable, "-m", "expertd", *words]))
    nbytes = warmed["resident_bytes"] or warmed["target_bytes"]
    found = {"nbytes": nbytes, "warm": warmed["bytes_per_second"]}
    for way in ("cached", "direct"):
        pagecache.drop([job.model])
        with memory_group(job.memory) as group:
            found[way] = nbytes / float(_output(group, [sys.executable, "-c", _READ, str(job.model), str(nbytes), way]))
    return found


def _output(group: MemoryGroup, argv: Sequence[str]) -> str:
    done = subprocess.run(group.command(argv), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{argv[1:4]} failed: {done.stderr[-400:]}")
    return done.stdout


def _summary(rows: Sequence[dict[str, Any]], speeds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over the runs. `first_share` is the first answer's speed, and the steady time to the first token by the
    first one, as shares of steady."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        first, again = [r["first"] for r in mine], [a for r in mine for a in r["again"]]
        steady = {key: median(a[key] for a in again) for key in ("ttft_seconds", "tokens_per_second")}
        found[name] = {
            "ready_seconds": median(r["before_seconds"] + r["ready_seconds"] for r in mine),
            **{key: median(f[key] for f in first) for key in first[0]},
            "steady": steady,
            "first_share": {
                "tokens_per_second": median(f["tokens_per_second"] for f in first) / steady["tokens_per_second"],
                "ttft_seconds": steady["ttft_seconds"] / median(f["ttft_seconds"] for f in first),
            },
        }
        if name in ("profile", "rehearsed"):
            found[name]["warm_bytes_per_second"] = median(r["warm"]["bytes_per_second"] for r in mine)
    if speeds:
        speed = {way: median(s[way] for s in speeds) for way in ("warm", "cached", "direct")}
        found["bytes_per_second"] = speed
        found["warm_share_of_sequential"] = speed["warm"] / max(speed["cached"], speed["direct"])
    return found


def measure(job: Job, arms: Sequence[str], runs: int, pairs: int) -> dict[str, Any]:
    """All of it. BenchError without root or a cgroup."""
    _teach(job)
    rows = []
    for run in range(runs):
        turn = run % len(arms)
        rows += [_said(_arm(name, job)) for name in (*arms[turn:], *arms[:turn])]
    speeds = [_said(_speeds(job)) for _ in range(pairs)]
    return {
        "model_bytes": job.model.stat().st_size, "memory_bytes": job.memory,
        "read_ahead_kb": read_limits(job.model).read_ahead_kb, "arms": rows, "speeds": speeds,
        "summary": _summary(rows, speeds),
    }  # fmt: skip


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """A row goes to standard error at once, so that a run that is ended was not for nothing."""
    click.echo(json.dumps(row), err=True)
    return row


@click.command()
@click.option("--size", default="1800MB", show_default=True, help="Size of the inflated model.")
@click.option("--memory", default="900MB", show_default=True, help="Limit of each arm's cgroup.")
@click.option("--budget", default="auto", show_default=True, help="As for `expertd serve`.")
@click.option("--arms", default=",".join(ARMS), show_default=True)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Times each arm is run.")
@click.option("--pairs", type=click.IntRange(0), default=5, show_default=True, help="Warm-ups against reads in order.")
@click.option("--read-ahead", "read_ahead_kib", type=int, metavar="KIB", help="Set the read_ahead_kb meanwhile.")
@click.option("--work", type=click.Path(path_type=Path), help="Where the model is kept; else it is made and removed.")
def main(
    size: str, memory: str, budget: str, arms: str, runs: int, pairs: int, read_ahead_kib: int | None, work: Path | None
) -> None:
    """First answers after a restart, arm by arm, and the speed of a warm-up, as JSON."""
    # Ended from outside it unwinds as by any error: daemons end, read-ahead is put back.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    wanted = arms.split(",")
    if unknown := set(wanted).difference(ARMS):
        raise click.UsageError(f"no arm: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if "vmtouch" in wanted and shutil.which("vmtouch") is None:
        raise click.UsageError("vmtouch is not installed: apt-get install vmtouch, or leave the arm out")
    with tempfile.TemporaryDirectory(prefix="expertd-warmstart-", dir=work or os.environ.get("TMPDIR")) as directory:
        plan = inflate.plan(parse_size(size))
        model = (work or Path(directory)) / plan.file_name()
        inflate.write(plan, model)
        taught = Path(directory) / "taught"
        taught.mkdir()
        job = Job(model, Path(directory), parse_size(memory), budget, taught)
        with read_ahead(model, read_ahead_kib):
            found = measure(job, wanted, runs, pairs)
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
