"""What one run of one arm is told and what it tells back, as data that crosses a pipe as JSON.

An arm is a way of running the model; a run is one process of an arm, from a cold page cache to its last token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from expertd.bench.meter import ZERO, Reading
from expertd.errors import UsageError
from expertd.units import parse_size


class Kind(StrEnum):
    """How an arm runs the model.

    plain: llama-cpp-python's mmap as it is, repacking off, so that the weights stay in the mapping and the cgroup's
    page cache is what holds them. repacked: llama-cpp-python's own default, which copies 4-bit experts into anonymous
    memory; only where the whole model fits. steered: expertd with steering on. auto: expertd choosing for itself.
    """

    PLAIN = "plain"
    REPACKED = "repacked"
    STEERED = "steered"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Arm:
    """`budget` in bytes is for steered arms; 0 follows the machine. `policy` "" is expertd's default."""

    name: str
    kind: Kind
    budget: int = 0
    policy: str = ""

    @property
    def is_expertd(self) -> bool:
        """Whether expertd runs it, steering or not."""
        return self.kind in (Kind.STEERED, Kind.AUTO)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """From "plain", "steered", "steered@1780MB", "steered@1780MB/lru" or "steered/lru". Raises UsageError."""
        rest, _, policy = text.partition("/")
        kind, _, budget = rest.partition("@")
        try:
            arm = cls(text, Kind(kind), parse_size(budget) if budget else 0, policy)
        except ValueError:
            raise UsageError(
                f"no arm {kind!r}", hint=f"one of {', '.join(Kind)}; a budget and a policy may follow: steered@2GiB/lru"
            ) from None
        if (arm.budget or arm.policy) and not arm.is_expertd:
            raise UsageError(f"arm {text}: only steered arms have a budget and a policy")
        return arm


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or ready token ids where there is no text to speak of. `topic` labels it in reports."""

    topic: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run. `prompt_tokens` 0 keeps prompts whole, else cuts them; `n_batch` and `n_ubatch` 0 are the arm's own
    defaults, `threads` 0 the physical cores; `routes` "" leaves routing to the model."""

    arm: Arm
    model: str
    prompts: tuple[Prompt, ...]
    n_tokens: int
    n_ctx: int
    prompt_tokens: int = 0
    n_batch: int = 0
    n_ubatch: int = 0
    threads: int = 0
    routes: str = ""


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt's answer. `prompt_cost` ends with the first token, which is not in `token_seconds`: those are the gaps
    between tokens, and `decode_cost` is theirs. `output` are token ids, `logits` a digest of the last logits' bits."""

    topic: str
    prompt_tokens: int
    prompt_cost: Reading
    decode_cost: Reading
    token_seconds: tuple[float, ...]
    output: tuple[int, ...]
    logits: str = ""
    text: str = ""

    @property
    def ttft_seconds(self) -> float:
        return self.prompt_cost.seconds


@dataclass(frozen=True, slots=True)
class Cache:
    """What a steered arm's expert cache counted up to now or between two moments, and what the tap cost.

    `requests` and `hits` are experts, `splits` the times the graph was cut. `budget_bytes` and `resident_bytes` are the
    latest, not differences. `choice` says whether expertd steers, and why."""

    requests: int = 0
    hits: int = 0
    tap_seconds: float = 0.0
    splits: int = 0
    budget_bytes: int = 0
    resident_bytes: int = 0
    policy: str = ""
    choice: str = ""

    def since(self, earlier: Cache) -> Cache:
        """The counts between two moments."""
        return replace(
            self,
            requests=self.requests - earlier.requests,
            hits=self.hits - earlier.hits,
            tap_seconds=self.tap_seconds - earlier.tap_seconds,
            splits=self.splits - earlier.splits,
        )

    def plus(self, later: Cache) -> Cache:
        """Two counts together."""
        return replace(
            later,
            requests=self.requests + later.requests,
            hits=self.hits + later.hits,
            tap_seconds=self.tap_seconds + later.tap_seconds,
            splits=self.splits + later.splits,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to. `ready_cost` is from the process's first step to being able to answer, of which the load of
    the weights alone is `load_cost`. `finished` False: it was ended at its time limit, and this is what it had done by
    then. `wall_seconds` and `peak_bytes` (of the cgroup) are filled in from outside."""

    arm: str
    finished: bool
    load_cost: Reading
    ready_cost: Reading
    prompts: tuple[PromptRun, ...]
    repacked: bool = False
    """Whether the weights were repacked: other kernels, whose last bits are others."""
    cache: Cache | None = None
    wall_seconds: float = 0.0
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def decode_cost(self) -> Reading:
        """Of all prompts together, without their first tokens."""
        return _sum(p.decode_cost for p in self.prompts)

    @property
    def prompt_cost(self) -> Reading:
        """Of all prompts together, up to their first tokens."""
        return _sum(p.prompt_cost for p in self.prompts)

    @property
    def decoded(self) -> int:
        """Tokens that the decode cost is for."""
        return sum(len(p.token_seconds) for p in self.prompts)


def _sum(readings: Iterable[Reading]) -> Reading:
    total = ZERO
    for reading in readings:
        total = total.plus(reading)
    return total
