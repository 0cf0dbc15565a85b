"""Does it pay to let a request go first whose experts are resident? A replay of recorded routes by several
conversations at once, in order of arrival and by overlap. Deterministic: no clock, no disk.

    python -m expertd.bench.turns TRACE... [--budget 15%,25%] [--turn 24] [--away 4]

Each conversation of the traces asks for its tokens turn by turn; its next turn arrives `--away` requests after the
last one was answered, as a reader takes time. All conversations share one cache. Overlap goes by the conversation's
last turn; the bounds are the daemon's, with time left out.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertd.cache.expert_cache import ExpertCache
from expertd.cache.trace import LayerRoute, Trace
from expertd.cache.turns import Waiting, choose, overlap
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase

_FOREVER = float("inf")


@dataclass
class Conversation:
    """`turns` are what is left to ask, each the routes of its tokens; `uses` counts the experts of the last one."""

    turns: deque[list[LayerRoute]]
    uses: Counter[int] = field(default_factory=Counter)
    overtaken: int = 0
    away: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Requests are experts wanted; `overtakings` how often somebody was overtaken, `most` the most of one turn."""

    requests: int
    hits: int
    decode_requests: int
    decode_hits: int
    turns: int
    overtakings: int
    most: int


def conversations(traces: Sequence[Trace], turn: int, prompts: str) -> list[Conversation]:
    """One for each time a prompt follows decoded tokens in a trace, the traces' mixed in turn. `prompts`: `first`
    keeps the prompt before a conversation's first turn, `each` repeats it before every turn, `none` leaves it out."""
    by_trace = [list(_split(trace, turn, prompts)) for trace in traces]
    found = []
    for i in range(max(len(c) for c in by_trace)):
        found += [c[i] for c in by_trace if i < len(c)]
    return found


def _split(trace: Trace, turn: int, prompts: str) -> Iterator[Conversation]:
    prompt: list[LayerRoute] = []
    tokens: list[list[LayerRoute]] = []
    first = trace.routes[0].layer
    for route in trace.routes:
        if route.phase is Phase.PREFILL:
            if tokens:
                yield _conversation(prompt, tokens, turn, prompts)
                prompt, tokens = [], []
            prompt.append(route)
            continue
        if route.layer == first or not tokens:
            tokens.append([])
        tokens[-1].append(route)
    if tokens:
        yield _conversation(prompt, tokens, turn, prompts)


def _conversation(prompt: list[LayerRoute], tokens: list[list[LayerRoute]], turn: int, prompts: str) -> Conversation:
    turns: deque[list[LayerRoute]] = deque()
    for at in range(0, len(tokens), turn):
        before = prompt if prompts == "each" or (prompts == "first" and at == 0) else []
        turns.append([*before, *(r for token in tokens[at : at + turn] for r in token)])
    return Conversation(turns)


def play(made: list[Conversation], cache: ExpertCache, n_experts: int, most_overtaken: int, away: int) -> Result:
    """All turns through one cache; `most_overtaken` 0 is the order of arrival."""
    queue, reading = list(made), list[Conversation]()
    counts: Counter[str] = Counter()
    most = 0
    while queue or reading:
        while reading and (not queue or reading[0].away <= 0):
            queue.append(reading.pop(0))
        rows = [Waiting(overlap(c.uses, cache.is_resident), c.overtaken, 0.0) for c in queue]
        index = choose(rows, most_overtaken, _FOREVER) if most_overtaken else 0
        for passed in queue[:index]:
            passed.overtaken += 1
            most = max(most, passed.overtaken)
        counts["overtakings"] += index
        counts["turns"] += 1
        chosen = queue.pop(index)
        chosen.overtaken, chosen.uses = 0, Counter()
        for route in chosen.turns.popleft():
            fetched = len(cache.route(route.layer, route.ids, route.phase, route.n_tokens).fetch)
            wanted = set(route.ids)
            counts["requests"] += len(wanted)
            counts["hits"] += len(wanted) - fetched
            if route.phase is Phase.DECODE:
                counts["decode_requests"] += len(wanted)
                counts["decode_hits"] += len(wanted) - fetched
                chosen.uses.update(route.layer * n_experts + i for i in wanted)
        for reader in reading:
            reader.away -= 1
        if chosen.turns:
            chosen.away = away
            reading.append(chosen)
    return Result(
        counts["requests"], counts["hits"], counts["decode_requests"], counts["decode_hits"], counts["turns"],
        counts["overtakings"], most,
    )  # fmt: skip


def compare(
    traces: Sequence[Trace], share: float, *, turn: int = 24, away: int = 4, most_overtaken: int = 4,
    prompts: str = "first", policy: str = "auto",
) -> tuple[Result, Result]:  # fmt: skip
    """In order of arrival, and by overlap, from an empty cache each."""
    trace = traces[0]
    sizes = trace.sizes()
    results = []
    for bound in (0, most_overtaken):
        cache = ExpertCache(sizes, trace.n_experts, int(share * sum(sizes)), policy, n_used=trace.k)
        results.append(play(conversations(traces, turn, prompts), cache, trace.n_experts, bound, away))
    return results[0], results[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--budget", default="10%,15%,25%,50%", help="shares of the experts' bytes")
    parser.add_argument("--turn", default="24", help="tokens of one answer, several by commas")
    parser.add_argument("--away", type=int, default=4, help="requests answered before a conversation's next turn")
    parser.add_argument("--overtaken", type=int, default=4, help="how often a request may be overtaken")
    parser.add_argument("--prompts", choices=("none", "first", "each"), default="first")
    given = parser.parse_args(arguments)
    traces = [load_trace(path) for path in given.traces]
    print("| budget | tokens | in order | by overlap | decode, in order | decode, by overlap | passed a turn | most |")
    print("|---|---|---|---|---|---|---|---|")
    for share in given.budget.split(","):
        for turn in given.turn.split(","):
            a, b = compare(
                traces, float(share.rstrip("%")) / 100, turn=int(turn), away=given.away,
                most_overtaken=given.overtaken, prompts=given.prompts,
            )  # fmt: skip
            ratios = [a.hits / a.requests, b.hits / b.requests]
            ratios += [r.decode_hits / r.decode_requests for r in (a, b)]
            numbers = " | ".join(f"{r:.4f}" for r in ratios)
            print(f"| {share} | {turn} | {numbers} | {b.overtakings / b.turns:.2f} | {b.most} |")


if __name__ == "__main__":
    main()
