"""A warm-up of the running daemon: which experts, admitted to the cache and read batch by batch, and what came of it.

1. The dense weights, unless they are there.
2. The experts of the order, hottest first, as many as the budget holds; each batch is admitted before it is read, so
   that what it displaces goes first and the budget is kept throughout. Reading lives in `pages.warming`.
3. Asked of the kernel at the end: what of it is resident. What is not is dropped from the cache, too, and said.
4. Mapped, so that the first token takes no faults, and so that the kernel, which reclaims what was read first and
   never used, does not begin with the hottest.
5. Pinned, where that was asked for (`actions`).

A warm-up that nobody asked for stands aside while a request is computed: what is not read yet is admitted no more, so
that the request reads it as any miss, and the disk is the request's.
Steps run in the pager's thread, between evictions; tokens are computed meanwhile. Cancelling leaves what was read, the
hottest first, and the next warm-up goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertd.cache.decision import Decision
from expertd.cache.expert_cache import ExpertCache
from expertd.pages import residency
from expertd.pages.warming import Skip, WarmPlan, WarmProgress, warm_steps
from expertd.pages.worker import Ticket
from expertd.runtime.profile import Profile
from expertd.runtime.steering import Steering
from expertd.types import ExpertLayout
from expertd.units import format_size

LEVELS = ("none", "dense", "profile", "all")
_BATCH_NBYTES = 128 << 20
_MAP_AT_ONCE = 8
_REST_SECONDS = 0.02
_LN2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """What to warm. `dense` is the dense weights alone, `profile` also the profile's experts, `all` all experts, those
    of the profile first. `budget_bytes` bounds the experts; None is the cache's budget. `pin` locks them afterwards.
    `aside` lets requests go first."""

    level: str = "profile"
    profile: str | None = None
    budget_bytes: int | None = None
    pin: bool = False
    aside: bool = False


def scores_of(profile: Profile, half_life: float) -> list[float]:
    """A profile as the cache's scores by expert id: what each would have come to, had this traffic gone on for long. A
    decayed score with chance p a token settles at p * half_life / ln 2."""
    return [p * half_life / _LN2 for p in profile.chances()]


def choose(
    layout: ExpertLayout, heat: Sequence[float], *, level: str, room_bytes: int, bound: str = "the budget"
) -> tuple[list[int], Skip | None]:
    """Experts of the level, hottest first, as many as fit; and those that do not, as one line that names the bound."""
    sizes = layout.expert_sizes
    if level == "dense":
        return [], None
    order = sorted((e for e, size in enumerate(sizes) if size), key=lambda e: (-heat[e], e))
    if level == "profile":
        order = [e for e in order if heat[e] > 0.0]
    chosen: list[int] = []
    left = room_bytes
    for n, expert in enumerate(order):
        left -= sizes[expert]
        if left < 0:
            rest = order[n:]
            nbytes = sum(sizes[e] for e in rest)
            return chosen, Skip(f"{len(rest)} experts", nbytes, f"beyond {bound} of {format_size(room_bytes)}")
        chosen.append(expert)
    return chosen, None


@dataclass
class WarmUp:
    """One warm-up. `steps` is the pager thread's; the rest may be read from anywhere while it runs."""

    steering: Steering
    order: WarmOrder
    profile: str
    experts: list[int]
    dense: bool
    skipped: list[Skip] = field(default_factory=list)
    ticket: Ticket | None = None
    cancelled: bool = False
    phase: str = "waiting"
    """waiting, dense, experts, checking, mapping, done."""
    seconds: float = 0.0
    read_seconds: float = 0.0
    locked_bytes: int = 0
    resident: tuple[int, int] | None = None
    """(experts, bytes of them and of dense weights) found resident; None where the kernel does not tell."""
    checked: bool = False

    def __post_init__(self) -> None:
        layout = self.steering.layout
        target = sum(layout.expert_sizes[e] for e in self.experts) + (layout.dense_nbytes if self.dense else 0)
        self.progress = WarmProgress(target)
        self._began = time.monotonic()
        self._admitted: list[int] = []
        self._others: list[int] = []
        self._rested = 0.0

    @property
    def target_bytes(self) -> int:
        return self.progress.target_bytes

    @property
    def done_bytes(self) -> int:
        return self.progress.done_bytes

    @property
    def finished(self) -> bool:
        return self.phase == "done" or (self.ticket is not None and self.ticket.finished)

    def cancel(self) -> None:
        """Ends it before its next step."""
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()

    def steps(self) -> Iterator[float | None]:
        """The whole of it; a number is seconds in which there is nothing to do."""
        began = time.monotonic()
        if self.dense:
            self.phase = "dense"
            yield from self._read_dense()
        self.phase = "experts"
        self._others = self._outsiders()
        for batch in _batches(self.experts, self.steering.layout.expert_sizes):
            yield from self._read_batch(batch)
        self.read_seconds = time.monotonic() - began - self._rested
        self.phase = "checking"
        yield from self._map((yield from self._check()))
        self.seconds = time.monotonic() - began
        self.phase = "done"

    def _read_dense(self) -> Iterator[None]:
        layout, pager = self.steering.layout, self.steering.pager
        yield from warm_steps(pager, WarmPlan(layout.dense, (), layout.dense_nbytes, ()), self.progress)

    def _read_batch(self, batch: list[int]) -> Iterator[float | None]:
        """Number 2. What is resident by the cache's account is looked at, too: the kernel may have taken of it."""
        while True:
            yield from self._rest()
            done, skips = self.progress.done_bytes, len(self.progress.skipped)
            there = self._admit(batch)
            # Evictions go before the next step, so that the page cache does not hold both.
            yield None
            for _ in warm_steps(self.steering.pager, WarmPlan((), tuple(there), 0, ()), self.progress):
                if self._in_the_way:
                    break
                yield None
            else:
                self._admitted += there
                return
            yield from self._stand_aside(there)
            self.progress.done_bytes = done
            del self.progress.skipped[skips:]

    @property
    def _in_the_way(self) -> bool:
        return self.order.aside and self.steering.serving

    def _stand_aside(self, experts: list[int]) -> Iterator[float | None]:
        """What is not read is no longer resident by the cache's account. From now on the cache's policy alone says
        what goes for the rest: what the requests use may be hotter."""
        if missing := (yield from self._missing(experts)):
            self.steering.forget(missing)
        self._others = []

    def _rest(self) -> Iterator[float]:
        """Until no request is computed."""
        began = time.monotonic()
        while self._in_the_way:
            yield _REST_SECONDS
        self._rested += time.monotonic() - began

    def _admit(self, batch: list[int]) -> list[int]:
        """Takes a batch into the cache. Returns what it took."""
        steering, sizes = self.steering, self.steering.layout.expert_sizes
        steering.act(lambda cache: self._take_in(cache, batch), fetch=False)
        states = steering.read(lambda cache: [cache.is_resident(e) for e in batch])
        there = [e for e, resident in zip(batch, states, strict=True) if resident]
        refused = sum(sizes[e] for e, resident in zip(batch, states, strict=True) if not resident)
        if refused:
            what = f"{len(batch) - len(there)} experts"
            self.progress.skipped.append(Skip(what, refused, "the budget shrank, or is full of pins"))
            self.progress.done_bytes += refused
        return there

    def _take_in(self, cache: ExpertCache, batch: list[int]) -> Decision:
        """Admits a batch in the place of experts that are not of the order, the coldest of them first."""
        sizes = cache.sizes
        need = sum(sizes[e] for e in batch if not cache.is_resident(e)) - (cache.budget_bytes - cache.resident_bytes)
        out: list[int] = []
        while need > 0 and self._others:
            expert = self._others.pop()
            if cache.is_resident(expert) and not cache.is_pinned(expert):
                out.append(expert)
                need -= sizes[expert]
        gone = cache.evict(out)
        decision = cache.admit(batch)
        decision.evict = [*gone, *decision.evict]
        return decision

    def _outsiders(self) -> list[int]:
        """Experts that the order does not ask for, the hottest first."""
        scores, wanted = self.steering.cache.scores(), set(self.experts)
        return sorted((e for e in range(len(scores)) if e not in wanted), key=lambda e: -scores[e])

    def _check(self) -> Generator[float | None, None, list[int]]:
        """Number 3. What is missing is read once more before it is given up. Returns what is there, hottest first."""
        steering, layout = self.steering, self.steering.layout
        here = [e for e in self._admitted if steering.cache.is_resident(e)]
        lost = yield from self._missing(here)
        if lost:
            yield from warm_steps(steering.pager, WarmPlan((), tuple(lost), 0, ()), self.progress)
            self.progress.done_bytes = self.progress.target_bytes
            lost = yield from self._missing(lost)
        self.checked = True
        if lost is None:
            return []
        if lost:
            size = sum(layout.expert_sizes[e] for e in lost)
            self.progress.skipped.append(
                Skip(f"{len(lost)} experts", size, "read, and taken again by the kernel: memory is short")
            )
            steering.forget(lost)
        if displaced := len(self._admitted) - len(here):
            self.progress.skipped.append(Skip(f"{displaced} experts", 0, "given up for hotter ones meanwhile"))
        there = set(here).difference(lost)
        dense = (residency.resident_bytes(steering.pager.mapping, layout.dense) or 0) if self.dense else 0
        self.resident = (len(there), sum(layout.expert_sizes[e] for e in there) + dense)
        return [e for e in here if e in there]

    def _map(self, experts: Sequence[int]) -> Iterator[float | None]:
        """Number 4. The hottest come last: they are to be the last to go."""
        self.phase = "mapping"
        left = list(experts)
        while left:
            yield from self._rest()
            part = [e for e in left[-_MAP_AT_ONCE:] if self.steering.cache.is_resident(e)]
            del left[-_MAP_AT_ONCE:]
            self.steering.pager.wait(part)
            yield None

    def _missing(self, experts: Sequence[int]) -> Generator[None, None, list[int] | None]:
        """Those of which less than 98 % of the bytes are in the page cache; None where the kernel does not tell."""
        layout, mapping = self.steering.layout, self.steering.pager.mapping
        lost = []
        for n, expert in enumerate(experts):
            if n % 64 == 0:
                yield None
            found = residency.resident_bytes(mapping, layout.extents(expert))
            if found is None:
                return None
            if found < 0.98 * layout.expert_sizes[expert]:
                lost.append(expert)
        return lost

    def report(self) -> dict[str, Any]:
        """What came of it, or how far it is."""
        seconds = self.seconds or time.monotonic() - self._began
        reading = self.read_seconds or seconds
        skipped = [*self.skipped, *self.progress.skipped]
        error = self.ticket.error if self.ticket else None
        return {
            "level": self.order.level, "profile": self.profile, "phase": self.phase,
            "target_bytes": self.target_bytes, "done_bytes": self.done_bytes,
            "resident_bytes": self.resident[1] if self.resident else None,
            "locked_bytes": self.locked_bytes, "read_bytes": self.progress.read_bytes,
            "seconds": round(seconds, 3),
            "bytes_per_second": int(self.progress.read_bytes / reading) if reading else 0,
            "unknown": self.target_bytes if self.checked and self.resident is None else 0,
            "experts": {"target": len(self.experts), "resident": self.resident[0] if self.resident else None},
            "interrupted": self.cancelled, "skipped": [s.json() for s in skipped],
            **({"error": str(error)} if error else {}),
        }  # fmt: skip


def _batches(experts: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for expert in experts:
        batch.append(expert)
        nbytes += sizes[expert]
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
