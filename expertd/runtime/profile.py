"""A profile: which experts one use of a model needs, as decayed counts, and what can be read off them. Pure.

A count is a router's choice; counts of a layer halve every `half_life` tokens of it, so that a profile follows its
topic and forgets. Compared across layers are shares: a count by its layer's sum, times the experts a token uses there,
which is the chance that a token needs the expert. So layers that are looked at only now and then (see `steering`) count
like the others.

Not here: files (`profile_file`), which profile is taught and when it is saved (`profiles`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from expertd import __version__
from expertd.errors import RequestError, StateError

HALF_LIFE_TOKENS = 4096.0
_BLOCK_TOKENS = 64
"""A layer's counts are decayed at once after so many of its tokens."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a profile must fit: the model's identity and the size of its map. `n_used` experts are used a token."""

    fingerprint: str
    model: str
    n_layers: int
    n_experts: int
    n_used: int


def is_name(name: str) -> bool:
    """Letters, digits, dots, dashes and underscores, so that a name can be a file's."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str, *, param: str = "expertd_profile") -> str:
    """The name as given. Raises RequestError where it is none (see `is_name`)."""
    if not is_name(name):
        raise RequestError(
            f"{name[:80]!r} is no profile's name",
            hint="up to 64 letters, digits, dots, dashes and underscores, a letter or digit first",
            param=param,
        )
    return name


@dataclass(slots=True)
class Profile:
    """One hot map. `counts` are by expert id; `tokens` is all that ever taught it; times are seconds since 1970.

    Taught by one thread at a time. `copy` may be called from another: it sees one moment, but for a layer that is being
    decayed just then, whose counts may be a percent apart.
    """

    name: str
    shape: Shape
    counts: list[float]
    tokens: int = 0
    half_life: float = HALF_LIFE_TOKENS
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    version: str = __version__
    sources: tuple[str, ...] = ()
    """Where counts came from besides traffic: imported files, merged profiles, rehearsals."""
    _routes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.shape.n_layers * self.shape.n_experts
        if len(self.counts) != n:
            raise StateError(f"profile {self.name}: {len(self.counts)} counts for a model with {n} experts")
        self._routes = [0] * self.shape.n_layers

    @classmethod
    def empty(cls, name: str, shape: Shape) -> Profile:
        return cls(name, shape, [0.0] * (shape.n_layers * shape.n_experts))

    def add(self, layer: int, ids: Iterable[int], n_ids: int) -> None:
        """The router chose the expert indices `ids`, `n_ids` of them, in `layer`."""
        counts, base = self.counts, layer * self.shape.n_experts
        for i in ids:
            counts[base + i] += 1.0
        routes = self._routes[layer] + n_ids
        self._routes[layer] = routes
        if routes >= _BLOCK_TOKENS * self.shape.n_used:
            self._decay(layer, routes)

    def _decay(self, layer: int, routes: int) -> None:
        factor = 0.5 ** (routes / self.shape.n_used / self.half_life)
        first = layer * self.shape.n_experts
        counts = self.counts
        for expert in range(first, first + self.shape.n_experts):
            counts[expert] *= factor
        self._routes[layer] = 0

    def copy(self, name: str = "") -> Profile:
        return replace(self, name=name or self.name, counts=self.counts[:], _routes=[])

    @property
    def blank(self) -> bool:
        """Whether nothing was ever counted."""
        return not any(self.counts)

    def chances(self) -> list[float]:
        """By expert id: the chance that a token needs the expert."""
        n, k = self.shape.n_experts, self.shape.n_used
        out: list[float] = []
        for first in range(0, len(self.counts), n):
            row = self.counts[first : first + n]
            total = sum(row)
            out += [min(1.0, k * c / total) for c in row] if total else row
        return out

    def hottest(self) -> list[int]:
        """Expert ids that were ever counted, the likeliest first."""
        chances = self.chances()
        return sorted((e for e, p in enumerate(chances) if p > 0.0), key=lambda e: (-chances[e], e))


def merge(name: str, profiles: Sequence[Profile]) -> Profile:
    """The sum: each weighs by what it still remembers. All must be of one shape (StateError)."""
    first = profiles[0]
    if any(p.shape.fingerprint != first.shape.fingerprint for p in profiles):
        raise StateError("profiles of different models cannot be merged")
    return Profile(
        name,
        first.shape,
        [sum(column) for column in zip(*(p.counts for p in profiles), strict=True)],
        tokens=sum(p.tokens for p in profiles),
        created=min(p.created for p in profiles),
        updated=max(p.updated for p in profiles),
        sources=tuple(f"profile {p.name}" for p in profiles),
    )


def held_share(profile: Profile, hottest: Iterable[int], sizes: Sequence[int], budget_bytes: int) -> float:
    """Share of the profile's requests that hit when the first of `hottest` that fit into the budget are resident."""
    chances = profile.chances()
    total, left, held = sum(chances), budget_bytes, 0.0
    for expert in hottest:
        if sizes[expert] > left:
            break
        left -= sizes[expert]
        held += chances[expert]
    return held / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Concentration:
    """Share of a profile's requests that go to the hottest 10, 25 and 50 % of all experts; chance is 0.1, 0.25, 0.5."""

    top10: float
    top25: float
    top50: float

    def json(self) -> dict[str, float]:
        return {"top10": round(self.top10, 4), "top25": round(self.top25, 4), "top50": round(self.top50, 4)}


def concentration(chances: Sequence[float], n_experts: int) -> Concentration:
    """Of any map of `n_experts` experts in all; 0 where nothing was counted."""
    ordered = sorted(chances, reverse=True)
    total = sum(ordered)
    tops = [sum(ordered[: round(share * n_experts)]) / total if total else 0.0 for share in (0.10, 0.25, 0.50)]
    return Concentration(*tops)


def overlap(a: Profile, b: Profile, share: float) -> float:
    """How many of a's hottest `share` of experts are among b's hottest as well: 0 to 1; 0 where either is blank."""
    n = max(1, round(share * len(a.counts)))
    hot = set(a.hottest()[:n])
    return len(hot.intersection(b.hottest()[:n])) / len(hot) if hot else 0.0
