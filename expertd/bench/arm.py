"""`python -m expertd.bench.arm`: one run of one arm in a process of its own.

Reads a RunSpec as JSON on standard input; writes one JSON object a line on standard output: `start`, `ready`, then
for each prompt `prompt`, `first`, `token`s and `answer`, at last `run` with the whole Run, or `error`. What llama.cpp
says goes to standard error. Which arms there are and from how much memory they run is `ab`'s; what is made of the
lines, also of those of a run that never ended, is `child`'s.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from expertd.bench import meter
from expertd.bench.meter import Reading
from expertd.bench.routes import load as load_routes
from expertd.bench.spec import Cache, Prompt, PromptRun, Run, RunSpec
from expertd.engine import openmp
from expertd.engine.settings import physical_cores
from expertd.errors import BenchError, ExpertdError
from expertd.model.expertmap import build_map
from expertd.model.gguf import read_model

if TYPE_CHECKING:
    from expertd.bench.forcing import ForcedRoutes

Say = Callable[[dict[str, Any]], None]


class Runner(Protocol):
    """An arm that can be started, asked and closed; `plain` and `steered` have one each."""

    @property
    def repacked(self) -> bool: ...
    def start(self) -> Reading: ...
    def tokenize(self, text: str) -> list[int]: ...
    def generate(self, prompt: Sequence[int], n: int) -> Iterator[int]: ...
    def text(self, tokens: Sequence[int]) -> str: ...
    def logits(self) -> bytes: ...
    def cache(self) -> Cache | None: ...
    def close(self) -> None: ...


def run(spec: RunSpec, say: Say) -> Run:
    """Start the arm, answer every prompt, count. Raises ExpertdError when the arm cannot do it."""
    forced = _forced(spec)
    before = meter.read()
    say({"at": "start", "now": before})
    runner = _runner(spec, forced)
    try:
        load = runner.start()
        ready = meter.read().since(before)
        say({"at": "ready", "load_cost": load, "ready_cost": ready})
        answers, decoding = [], Cache()
        for prompt in spec.prompts:
            if forced is not None:
                forced.restart()
            answer, counted = _answer(runner, spec, prompt, say)
            answers.append(answer)
            decoding = decoding.plus(counted)
        return Run(
            arm=spec.arm.name,
            finished=True,
            load_cost=load,
            ready_cost=ready,
            prompts=tuple(answers),
            repacked=runner.repacked,
            cache=decoding if runner.cache() is not None else None,
            notes=("the run was longer than the trace, which started over",) if forced and forced.wrapped else (),
        )
    finally:
        runner.close()


def _answer(runner: Runner, spec: RunSpec, prompt: Prompt, say: Say) -> tuple[PromptRun, Cache]:
    """One prompt's answer, and what the expert cache counted after its first token."""
    tokens = list(prompt.tokens) or runner.tokenize(prompt.text)
    if spec.prompt_tokens:
        tokens = tokens[: spec.prompt_tokens]
    if len(tokens) + spec.n_tokens > spec.n_ctx:
        raise BenchError(
            f"a prompt of {len(tokens)} tokens and {spec.n_tokens} new ones do not fit into {spec.n_ctx}",
            hint="give --prompt-tokens, or a larger --ctx",
        )
    output: list[int] = []
    gaps: list[float] = []
    start = first = meter.read()
    counted = runner.cache()
    say({"at": "prompt", "topic": prompt.topic, "prompt_tokens": len(tokens), "now": start})
    last = start.seconds
    for token in runner.generate(tokens, spec.n_tokens):
        now = time.perf_counter()
        if output:
            gaps.append(now - last)
            say({"at": "token", "seconds": now - last, "token": token})
        else:
            first, counted = meter.read(), runner.cache()
            now = first.seconds
            say({"at": "first", "now": first, "token": token})
        last = now
        output.append(token)
    answer = PromptRun(
        topic=prompt.topic,
        prompt_tokens=len(tokens),
        prompt_cost=first.since(start),
        decode_cost=meter.read().since(first),
        token_seconds=tuple(gaps),
        output=tuple(output),
        logits=hashlib.blake2b(runner.logits(), digest_size=16).hexdigest(),
        text=runner.text(output),
    )
    say({"at": "answer", "answer": answer})
    end = runner.cache()
    return answer, end.since(counted) if end is not None and counted is not None else Cache()


def _forced(spec: RunSpec) -> ForcedRoutes | None:
    if not spec.routes:
        return None
    # This imports llama_cpp, which must come after its threads were settled.
    from expertd.bench.forcing import ForcedRoutes

    layout = build_map(read_model(spec.model)).layout()
    routes = load_routes(Path(spec.routes))
    routes.check_fits(layers=len(layout.layers), experts=layout.n_experts, k=layout.n_experts_used)
    return ForcedRoutes(routes, [m.layer for m in layout.layers])


def _runner(spec: RunSpec, forced: ForcedRoutes | None) -> Runner:
    # Only the arm that runs is imported: the other's modules would be memory in the group that it does not pay for.
    if not spec.arm.is_expertd:
        from expertd.bench.plain import PlainArm

        return PlainArm(spec, forced)
    from expertd.bench.steered import SteeredArm

    return SteeredArm(spec, forced)


def main() -> int:
    """The child's whole life. Returns its exit status: 0, or 1 after a line that says what was wrong."""
    out = sys.stdout.buffer

    def say(line: dict[str, Any]) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    try:
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RunSpec)
        if spec.arm.is_expertd:
            # As the daemon does, before anything imports llama_cpp. The plain arms have what llama-cpp-python gives.
            openmp.load(spec.threads)
        say({"at": "run", "run": run(_with_threads(spec), say)})
    except ExpertdError as e:
        say({"at": "error", "message": e.message, "hint": e.hint})
        return 1
    return 0


def _with_threads(spec: RunSpec) -> RunSpec:
    return spec if spec.threads else replace(spec, threads=physical_cores())


if __name__ == "__main__":
    sys.exit(main())
