"""Runs a demo's prompts, learns which experts they need, warms and pins these, and runs them again, measuring both.

1. First run: each prompt as it would be now, teaching the profile afresh (or adding to it).
2. The profile's experts are warmed, and pinned where that is wanted.
3. Second run, teaching nobody. Answers are greedy and no prompt takes over another's state, so that both runs compute
   the same tokens.
4. The second run's figures against the targets; where they are missed, what would help, by the figures themselves.

Lives on the event loop; what it asks of the service is in `Stage`. The server streams the events; the CLI prints them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from expertd.engine.requests import Event, Finished, GenerationRequest, Piece, Sampling
from expertd.errors import RequestError
from expertd.runtime.actions import Actions
from expertd.runtime.profiles import NOBODY
from expertd.runtime.warmup import WarmOrder
from expertd.units import format_seconds, format_size

MAX_PROMPTS = 256
_FEW_TOKENS = 4
"""An answer of fewer tokens has no speed to speak of."""
_NEARLY_ALL = 0.97


@dataclass(frozen=True, slots=True)
class RehearsalOrder:
    """Targets are for every prompt; None is none. `add` keeps what the profile knows already."""

    prompts: tuple[str, ...]
    profile: str = "demo"
    max_tokens: int = 64
    target_tps: float | None = None
    target_ttft_seconds: float | None = None
    pin: bool = False
    add: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """One prompt's run. `hit_ratio` is None where nothing is steered."""

    prompt_tokens: int
    tokens: int
    ttft_seconds: float
    tokens_per_second: float
    hit_ratio: float | None
    bytes_read: int
    major_faults: int
    text: str


class Stage(Protocol):
    """What a rehearsal needs of the service."""

    @property
    def actions(self) -> Actions: ...
    @property
    def steers(self) -> bool: ...
    def prompt_of(self, text: str) -> tuple[int, ...]: ...
    def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]: ...
    def warm(self, order: WarmOrder) -> AsyncGenerator[dict[str, Any], None]: ...


async def rehearse(stage: Stage, order: RehearsalOrder) -> AsyncGenerator[dict[str, Any], None]:
    """Yields an event a step and, at the end, the result. RequestError, StateError before the first."""
    prompts = [stage.prompt_of(text) for text in _checked(order, stage)]
    first: list[Figures] = []
    for n, prompt in enumerate(prompts):  # 1
        first.append(await _run(stage, prompt, order, order.profile))
        yield _event("first", n, len(prompts), first[-1])
    warmed: dict[str, Any] = {}
    if stage.steers:  # 2
        async for event in stage.warm(WarmOrder("profile", order.profile, pin=order.pin)):
            warmed = {**event, "event": "warm"}
            yield warmed
    second: list[Figures] = []
    for n, prompt in enumerate(prompts):  # 3
        second.append(await _run(stage, prompt, order, NOBODY))
        yield _event("second", n, len(prompts), second[-1])
    missed = [m for n, figures in enumerate(second) for m in _missed(n, figures, order)]  # 4
    yield {
        "event": "result", "ok": not missed, "profile": order.profile, "targets": _targets(order),
        "first": [asdict(f) for f in first], "second": [asdict(f) for f in second], "missed": missed, "warmed": warmed,
        "advice": list(_advice(second, order, stage, warmed)) if missed else [],
    }  # fmt: skip


def _checked(order: RehearsalOrder, stage: Stage) -> Sequence[str]:
    if not 0 < len(order.prompts) <= MAX_PROMPTS:
        raise RequestError(f"1 to {MAX_PROMPTS} prompts, not {len(order.prompts)}", param="prompts")
    if stage.steers:
        profiles = stage.actions.profiles
        profiles.check(order.profile)
        if not order.add:
            if order.profile == profiles.default and not profiles.get(order.profile).blank:
                raise RequestError(
                    f"a rehearsal would replace what profile {order.profile}, which every request teaches, has learnt",
                    hint="name another one, or add to it",
                    param="profile",
                )
            profiles.clear(order.profile, "rehearsal")
    return order.prompts


def _targets(order: RehearsalOrder) -> dict[str, float]:
    wanted = {"tokens_per_second": order.target_tps, "ttft_seconds": order.target_ttft_seconds}
    return {name: value for name, value in wanted.items() if value is not None}


def _event(name: str, n: int, total: int, figures: Figures) -> dict[str, Any]:
    return {"event": name, "prompt": n, "prompts": total, **asdict(figures)}


async def _run(stage: Stage, prompt: tuple[int, ...], order: RehearsalOrder, teaches: str) -> Figures:
    request = GenerationRequest(
        prompt, order.max_tokens, Sampling(temperature=0.0), cache_prompt=False, profile=teaches, request_id="rehearsal"
    )
    text = ""
    run = stage.run(request)
    try:
        async for event in run:
            if isinstance(event, Piece):
                text += event.text
            elif isinstance(event, Finished):
                return _figures(event, text)
    finally:
        await run.aclose()
    raise AssertionError("a request ended without its last event")


def _figures(event: Finished, text: str) -> Figures:
    timings, cost = event.timings, event.receipt
    return Figures(
        prompt_tokens=event.prompt_tokens,
        tokens=timings.predicted_n,
        ttft_seconds=round(event.first_token_ms / 1000, 4),
        tokens_per_second=round(timings.predicted_per_second, 2),
        hit_ratio=round(cost.expert_hits / cost.expert_requests, 4) if cost.expert_requests else None,
        bytes_read=cost.bytes_read,
        major_faults=cost.major_faults,
        text=text,
    )


def _missed(n: int, f: Figures, order: RehearsalOrder) -> Iterator[dict[str, Any]]:
    if order.target_tps is not None and f.tokens >= _FEW_TOKENS and f.tokens_per_second < order.target_tps:
        yield {"prompt": n, "what": "tokens_per_second", "wanted": order.target_tps, "got": f.tokens_per_second}
    if order.target_ttft_seconds is not None and f.ttft_seconds > order.target_ttft_seconds:
        yield {"prompt": n, "what": "ttft_seconds", "wanted": order.target_ttft_seconds, "got": f.ttft_seconds}


def _advice(second: Sequence[Figures], order: RehearsalOrder, stage: Stage, warmed: dict[str, Any]) -> Iterator[str]:
    """What would help, the cheapest first."""
    slow_prompts = [f for f in second if order.target_ttft_seconds and f.ttft_seconds > order.target_ttft_seconds]
    if slow_prompts and order.target_ttft_seconds:
        worst = max(slow_prompts, key=lambda f: f.ttft_seconds)
        fits = max(1, int(worst.prompt_tokens * order.target_ttft_seconds / worst.ttft_seconds))
        yield (
            f"fewer prompt tokens: {worst.prompt_tokens} take {format_seconds(worst.ttft_seconds)}, some {fits} would "
            f"take {format_seconds(order.target_ttft_seconds)}"
        )
    ratios = [f.hit_ratio for f in second if f.hit_ratio is not None]
    if ratios and min(ratios) < _NEARLY_ALL:
        short = sum(s["bytes"] for s in warmed.get("skipped", ()) if "budget" in s["why"])
        more = f", {format_size(short)} of them, to hold all that these prompts use" if short else ""
        yield f"more memory for experts{more}: {100 * min(ratios):.0f} % of the requests hit in the worst prompt"
        yield "a smaller quantisation: its experts are fewer bytes, so that more of them fit and a miss costs less"
    elif any(order.target_tps and f.tokens_per_second < order.target_tps for f in second):
        yield (
            "the experts were in memory, so that more of it does not help: a smaller quantisation, a model with fewer "
            "active parameters, or faster cores and memory"
        )
    if stage.steers and not order.pin and ratios and min(ratios) < _NEARLY_ALL:
        yield "--pin, so that nothing else on the machine takes the demo's experts"
