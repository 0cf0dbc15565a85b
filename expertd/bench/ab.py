"""Arms side by side: alternating runs, each in a process of its own, from a cold cache, in as much memory as is wanted.

1. Read-ahead is set where asked for, and put back at the end.
2. For each round, each arm in turn: a fresh cgroup, the model's pages dropped (or all read in, where warm is asked
   for), the run (`child`), the group removed.
3. Medians, ratios and the comparison of outputs are `results`'s.

Alternating spreads what changes on the machine over all arms alike.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from expertd.bench import pagecache
from expertd.bench.cgroup import MemoryGroup, memory_group
from expertd.bench.child import run_child
from expertd.bench.readahead import read_ahead
from expertd.bench.results import Comparison, compare, summarise
from expertd.bench.spec import Arm, Prompt, Run, RunSpec
from expertd.errors import UsageError
from expertd.model.gguf import read_model
from expertd.units import format_size

_STUCK_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Job:
    """What is compared. `memory_bytes` None runs in the memory there is, without a cgroup. `n_ctx` 0 is as much as the
    prompts can need. `read_ahead_kb` None leaves the disk as it is."""

    model: Path
    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    n_tokens: int = 100
    prompt_tokens: int = 0
    runs: int = 3
    memory_bytes: int | None = None
    limit_seconds: float = 600.0
    n_ctx: int = 0
    n_ubatch: int = 0
    threads: int = 0
    routes: Path | None = None
    read_ahead_kb: int | None = None
    warm: bool = False
    """Start from a page cache that holds the model, as far as there is memory, instead of none of it."""


class Watch(Protocol):
    """Is told how a comparison goes on."""

    def begins(self, arm: Arm, number: int) -> None:
        """A run, counted from 0 over all arms."""

    def line(self, line: dict[str, Any]) -> None:
        """What the run says: `at` is ready, prompt, first, token, answer ..."""

    def ends(self, arm: Arm, run: Run) -> None:
        """It is over."""


def run(job: Job, watch: Watch) -> Comparison:
    """Run all arms. Raises UsageError when the job makes no sense, ModelError, and BenchError when an arm fails."""
    check(job)
    model = read_model(job.model)
    specs = {arm.name: _spec(job, arm, model.integer("context_length") or 0) for arm in job.arms}
    found: dict[str, list[Run]] = {arm.name: [] for arm in job.arms}
    number = 0
    with read_ahead(job.model, job.read_ahead_kb):
        for _ in range(job.runs):
            for arm in job.arms:
                watch.begins(arm, number)
                done = _one(job, specs[arm.name], model.files, watch)
                watch.ends(arm, done)
                found[arm.name].append(done)
                number += 1
    return compare([summarise(arm, found[arm.name]) for arm in job.arms])


def check(job: Job) -> None:
    """Raises UsageError for what cannot be compared."""
    if len({arm.name for arm in job.arms}) < len(job.arms):
        raise UsageError("an arm is named twice")
    if not job.arms or not job.prompts:
        raise UsageError("there is nothing to run", hint="give at least one --arm and one prompt")
    if job.warm and job.memory_bytes is not None:
        # Pages count for the group that first touched them, which here would be nobody's with a limit.
        raise UsageError("a warm page cache would lie outside of the memory limit", hint="give --memory none")
    if job.runs < 1 or job.n_tokens < 2:
        raise UsageError("a comparison needs at least one run and two tokens")


def _one(job: Job, spec: RunSpec, files: tuple[Path, ...], watch: Watch) -> Run:
    group: AbstractContextManager[MemoryGroup | None]
    group = nullcontext() if job.memory_bytes is None else memory_group(job.memory_bytes)
    with group as held:
        stuck = pagecache.drop(files)
        if job.warm:
            pagecache.fill(files)
        done = run_child(spec, held, job.limit_seconds, watch.line)
    total = sum(f.stat().st_size for f in files)
    if stuck is not None and stuck > _STUCK_SHARE * total:
        note = f"{format_size(stuck)} of the model stayed in the page cache: another process maps or locks it"
        return replace(done, notes=(*done.notes, note))
    return done


def _spec(job: Job, arm: Arm, trained: int) -> RunSpec:
    return RunSpec(
        arm=arm,
        model=str(job.model.resolve()),
        prompts=job.prompts,
        n_tokens=job.n_tokens,
        n_ctx=job.n_ctx or _context(job, trained),
        prompt_tokens=job.prompt_tokens,
        n_batch=job.n_ubatch,
        n_ubatch=job.n_ubatch,
        threads=job.threads,
        routes=str(job.routes.resolve()) if job.routes else "",
    )


def _context(job: Job, trained: int) -> int:
    """Tokens that the longest prompt and its answer can need: a token stands for at least one byte."""
    longest = max(len(p.tokens) or len(p.text.encode()) + 1 for p in job.prompts)
    if job.prompt_tokens:
        longest = min(longest, job.prompt_tokens)
    need = -(-(longest + job.n_tokens) // 256) * 256
    return min(need, trained) if trained else need
