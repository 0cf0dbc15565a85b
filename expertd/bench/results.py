"""From runs to a comparison: medians, spread, ratios, and whether all arms said the same. Pure.

1. A number of an arm is the median of its runs; its spread is the least and the most.
2. A run that was ended at its limit counts with the most it could have been: one token more than it had, in the time
   it had; and its times with the least they could have been. Such an arm is marked `bound`.
3. Outputs are compared token by token, and the last logits bit by bit, among runs with the same kernels: repacked
   weights round differently. Of a run that was ended, tokens are compared as far as it came.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertd.bench.spec import Arm, Run

Number = float | None


def _tokens_per_second(r: Run) -> Number:
    seconds = r.decode_cost.seconds
    if r.finished:
        return r.decoded / seconds if seconds else None
    if not any(p.output for p in r.prompts):
        return 1 / r.wall_seconds
    return (r.decoded + 1) / seconds if seconds else None


def _per_token(total: float, r: Run) -> Number:
    return total / r.decoded if r.decoded else None


def _ttft(r: Run) -> Number:
    return statistics.fmean(p.ttft_seconds for p in r.prompts) if r.prompts else None


def _hit_ratio(r: Run) -> Number:
    return r.cache.hits / r.cache.requests if r.cache and r.cache.requests else None


def _cache_per_token(total: Callable[[Any], float], r: Run) -> Number:
    return _per_token(total(r.cache), r) if r.cache else None


def _rate(amount: float, seconds: float) -> Number:
    return amount / seconds if seconds else None


METRICS: Mapping[str, Callable[[Run], Number]] = {
    "tokens_per_second": _tokens_per_second,
    "ttft_seconds": _ttft,
    "load_seconds": lambda r: r.load_cost.seconds,
    "load_read_bytes": lambda r: r.load_cost.read_bytes,
    "ready_seconds": lambda r: r.ready_cost.seconds,
    "start_to_first_token_seconds": lambda r: r.ready_cost.seconds + (r.prompts[0].ttft_seconds if r.prompts else 0.0),
    "ready_read_bytes": lambda r: r.ready_cost.read_bytes,
    "read_bytes_per_token": lambda r: _per_token(r.decode_cost.read_bytes, r),
    "major_faults_per_token": lambda r: _per_token(r.decode_cost.major_faults, r),
    "cpu_seconds_per_token": lambda r: _per_token(r.decode_cost.cpu_seconds, r),
    "hit_ratio": _hit_ratio,
    "prompt_tokens_per_second": lambda r: _rate(sum(p.prompt_tokens for p in r.prompts), r.prompt_cost.seconds),
    "prompt_read_bytes": lambda r: r.prompt_cost.read_bytes,
    "prompt_read_bytes_per_second": lambda r: _rate(r.prompt_cost.read_bytes, r.prompt_cost.seconds),
    "tap_seconds_per_token": lambda r: _cache_per_token(lambda c: c.tap_seconds, r),
    "splits_per_token": lambda r: _cache_per_token(lambda c: c.splits, r),
    "peak_bytes": lambda r: r.peak_bytes,
}
"""What is measured of a run. Seconds, bytes, tokens; None where it cannot be known. `load_` is llama.cpp's
load alone, `ready_` all that comes before the first request (with expertd: the dense weights, read and locked), and
`ttft_seconds` a request's way to its first token (the mean of a run's prompts)."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All runs of one arm. `values` has METRICS' medians, `spread` their least and most."""

    arm: Arm
    runs: tuple[Run, ...]
    values: Mapping[str, Number]
    spread: Mapping[str, tuple[float, float]]

    @property
    def bound(self) -> bool:
        """Whether a run did not finish: its speed is at most, its times are at least what is told."""
        return not all(r.finished for r in self.runs)

    @property
    def token_seconds(self) -> Mapping[str, float]:
        """Percentiles of the gaps between tokens, all runs together."""
        gaps = sorted(g for r in self.runs for p in r.prompts for g in p.token_seconds)
        return {f"p{share}": percentile(gaps, share) for share in (50, 90, 99)} if gaps else {}


def percentile(ascending: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of a non-empty ascending series."""
    return ascending[max(0, math.ceil(len(ascending) * share / 100) - 1)]


def summarise(arm: Arm, runs: Sequence[Run]) -> ArmResult:
    """Medians and spread of at least one run."""
    values: dict[str, Number] = {}
    spread: dict[str, tuple[float, float]] = {}
    for name, measure in METRICS.items():
        found = [v for v in map(measure, runs) if v is not None]
        values[name] = statistics.median(found) if found else None
        if found:
            spread[name] = min(found), max(found)
    return ArmResult(arm, tuple(runs), values, spread)


_RATIOS = {
    "decode_ratio": "tokens_per_second",
    "ttft_ratio": "ttft_seconds",
    "load_ratio": "load_seconds",
    "load_bytes_ratio": "load_read_bytes",
    "ready_ratio": "ready_seconds",
    "ready_bytes_ratio": "ready_read_bytes",
    "start_to_first_token_ratio": "start_to_first_token_seconds",
    "prompt_ratio": "prompt_tokens_per_second",
    "read_ratio": "read_bytes_per_token",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first leaves what another run said; `token` counts from 0."""

    arm: str
    run: int
    prompt: int
    token: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arms in the order in which they were given; ratios are to the first of them."""

    arms: tuple[ArmResult, ...]
    difference: Difference | None
    same_logits: bool
    """Whether the last logits of every prompt were the same to the last bit."""

    @property
    def same_output(self) -> bool:
        return self.difference is None

    def ratios(self, arm: ArmResult) -> dict[str, Number]:
        """The arm's numbers as multiples of the first arm's. For speeds above 1 is better, for the rest below 1."""
        base = self.arms[0]
        found: dict[str, Number] = {}
        for name, metric in _RATIOS.items():
            a, b = arm.values[metric], base.values[metric]
            found[name] = a / b if a is not None and b else None
        if self.decode_ratio_is(arm) == "unknown":
            found["decode_ratio"] = None
        return found

    def decode_ratio_is(self, arm: ArmResult) -> str:
        """What the ratio of decode speeds is, where runs were ended: exact, at least, at most, or unknown."""
        base = self.arms[0]
        if arm.bound and base.bound and arm is not base:
            return "unknown"
        if arm is base or not (arm.bound or base.bound):
            return "exact"
        return "at least" if base.bound else "at most"

    @property
    def chief(self) -> ArmResult:
        """The arm whose ratios are the comparison's: the first steered one, else the last."""
        steered = [a for a in self.arms[1:] if a.arm.is_expertd]
        return steered[0] if steered else self.arms[-1]


def compare(arms: Sequence[ArmResult]) -> Comparison:
    """Put arms side by side, and their outputs against each other."""
    return Comparison(tuple(arms), _difference(arms), _same_logits(arms))


def _difference(arms: Sequence[ArmResult]) -> Difference | None:
    # A run that was ended may have said little: what is compared with is the longest output of each prompt.
    runs = [(a, number, r) for a in arms for number, r in enumerate(a.runs)]
    longest: dict[tuple[bool, int], tuple[int, ...]] = {}
    for _, _, r in runs:
        for i, p in enumerate(r.prompts):
            key = r.repacked, i
            longest[key] = max(longest.get(key, ()), p.output, key=len)
    for a, number, r in runs:
        for i, p in enumerate(r.prompts):
            for j, (said, wanted) in enumerate(zip(p.output, longest[r.repacked, i], strict=False)):
                if said != wanted:
                    return Difference(a.arm.name, number, i, j)
    return None


def _same_logits(arms: Sequence[ArmResult]) -> bool:
    seen: dict[tuple[bool, int], set[str]] = {}
    for r in (r for a in arms for r in a.runs if r.finished):
        for i, p in enumerate(r.prompts):
            seen.setdefault((r.repacked, i), set()).add(p.logits)
    return all(len(digests) == 1 for digests in seen.values())


def to_json(c: Comparison) -> dict[str, Any]:
    """The arms and ratios with the contract's keys; runs with every token's time."""
    return {
        "arms": [_arm_json(a, c) for a in c.arms],
        **c.ratios(c.chief),
        "decode_ratio_is": c.decode_ratio_is(c.chief),
        "same_output": c.same_output,
        "same_logits": c.same_logits,
        "difference": c.difference,
    }


def _arm_json(a: ArmResult, c: Comparison) -> dict[str, Any]:
    last = a.runs[-1].cache
    return {
        "name": a.arm.name,
        "kind": a.arm.kind,
        **a.values,
        "bound": a.bound,
        "token_seconds": a.token_seconds,
        "spread": a.spread,
        "ratios": c.ratios(a),
        "decode_ratio_is": c.decode_ratio_is(a),
        "policy": last.policy if last else "",
        "budget_bytes": last.budget_bytes if last else None,
        "resident_bytes": last.resident_bytes if last else None,
        "choice": last.choice if last else "",
        "notes": sorted({note for r in a.runs for note in r.notes}),
        "runs": a.runs,
    }
