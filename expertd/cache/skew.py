"""How concentrated routing is, how much of that lasts, and whether pinning or warming can help therefore.

The hottest experts of a short record take more than their share by chance alone. What counts is what the hottest of
its first half take of its second half: under even routing that is no more than their number.

Pure. Deciding pins while a model runs is `runtime.pinning`'s, from windows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertd.cache.trace import LayerRoute

SHARES = (0.10, 0.25, 0.50)
"""Parts of the experts, the hottest first."""
_LEAST_TOKENS = 32
"""Below that many tokens halves say nothing."""
_UNEVEN = 1.25
"""Times their number that the hottest experts must take for routing to count as skewed at all."""
_STRONG = 2.0


@dataclass(frozen=True, slots=True)
class Skew:
    """Shares of the requests that the hottest parts of the experts (as `SHARES`) take.

    `taken` by the hottest of the whole record; `lasting` is what the hottest of the first half take of the second.
    `layer` is -1 for all layers together.
    """

    layer: int
    requests: int
    taken: tuple[float, ...]
    lasting: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SkewReport:
    """`helps` tells whether pinning or warming can help, `verdict` says why in a sentence."""

    tokens: int
    overall: Skew
    layers: tuple[Skew, ...]
    helps: bool
    verdict: str


def measure(routes: Sequence[LayerRoute], n_experts: int) -> SkewReport:
    """From routes in their order, each layer of `n_experts`. Each token's use of an expert is a request."""
    steps = list(dict.fromkeys((r.turn, step) for r in routes for step, _ in r.tokens()))
    in_first = set(steps[: len(steps) // 2])
    halves: dict[int, tuple[list[int], list[int]]] = {}
    for r in routes:
        first, second = halves.setdefault(r.layer, ([0] * n_experts, [0] * n_experts))
        for step, ids in r.tokens():
            counts = first if (r.turn, step) in in_first else second
            for i in ids:
                counts[i] += 1
    layers = tuple(_skew(layer, *halves[layer]) for layer in sorted(halves))
    overall = _skew(-1, [c for a, _ in halves.values() for c in a], [c for _, b in halves.values() for c in b])
    helps, verdict = _judge(len(steps), overall)
    return SkewReport(len(steps), overall, layers, helps, verdict)


def _skew(layer: int, first: Sequence[int], second: Sequence[int]) -> Skew:
    both = [a + b for a, b in zip(first, second, strict=True)]
    return Skew(layer, sum(both), _shares(both, both), _shares(first, second))


def _shares(ranked_by: Sequence[int], counts: Sequence[int]) -> tuple[float, ...]:
    """What the experts hottest in `ranked_by` take of `counts`, by `SHARES`."""
    order = sorted(range(len(counts)), key=lambda i: (-ranked_by[i], i))
    total = sum(counts)
    return tuple(sum(counts[i] for i in order[: round(s * len(order))]) / total if total else 0.0 for s in SHARES)


def _judge(tokens: int, overall: Skew) -> tuple[bool, str]:
    quarter = SHARES.index(0.25)
    taken, lasting = overall.taken[quarter], overall.lasting[quarter]
    if tokens < _LEAST_TOKENS:
        return False, f"{tokens} tokens are too few to say whether pinning or warming can help"
    hottest = f"the hottest 25 % of the experts take {100 * taken:.0f} % of the requests"
    later = f"those of the first half take {100 * lasting:.0f} % of the second"
    if lasting >= _STRONG * SHARES[quarter]:
        return True, f"routing is skewed, and it lasts: {hottest}, and {later}; pinning and warming help"
    if lasting >= _UNEVEN * SHARES[quarter]:
        return True, f"routing is somewhat skewed: {hottest}, and {later}; warming helps a little, pinning hardly"
    if taken >= _STRONG * SHARES[quarter]:
        return False, (
            f"what is hot does not last: {hottest}, but {later}; pinning or warming cannot help, following can"
        )
    return False, f"routing is even: {hottest}, and {later}; pinning or warming cannot help"
