"""What a person can do to the experts of a running daemon: warm, pin, unpin and evict, as `selection` names them.

Each method decides under the cache's lock, lets the pager's thread do it, waits for that and says what came of it. They
block: call them from a thread that may wait, never from the event loop or the engine. One warm-up runs at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertd.errors import RequestError, StateError
from expertd.pages.locks import locked_by_kernel, refusal_words
from expertd.pages.warming import Skip
from expertd.pages.worker import Kind, Ticket
from expertd.runtime import warmup
from expertd.runtime.profiles import Profiles
from expertd.runtime.selection import Selection, choose
from expertd.runtime.steering import Steering
from expertd.runtime.tracing import Tracing
from expertd.runtime.warmup import WarmOrder, WarmUp
from expertd.units import format_seconds, format_size

log = logging.getLogger("expertd.actions")

_AT_ONCE = 8
_WAIT_SECONDS = 600.0


@dataclass
class PinJob:
    """Locks a few experts a step until the kernel refuses; what is refused is pinned in the cache no more."""

    steering: Steering
    experts: list[int]
    got: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    why: str = ""
    """Why it was refused."""
    ticket: Ticket | None = None

    def steps(self) -> Iterator[None]:
        """In the pager's thread."""
        for i in range(0, len(self.experts), _AT_ONCE):
            part = self.experts[i : i + _AT_ONCE]
            done = self.steering.pager.pin(part)
            self.got += done
            if len(done) < len(part):
                self.refused = self.experts[i + len(done) :]
                self.why = refusal_words(self.steering.pager.lock_refusal)
                self.steering.unpin(self.refused)
                return
            yield


class Actions:
    """Of one session. `pin_limit` gives the bytes of experts that may be pinned at this moment, `room` those that may
    be warmed without taking from what the next request allocates."""

    def __init__(
        self, steering: Steering, profiles: Profiles, tracing: Tracing, half_life: float, pin_limit: Callable[[], int],
        room: Callable[[], int],
    ) -> None:  # fmt: skip
        self.steering, self.profiles, self.tracing = steering, profiles, tracing
        self._half_life, self._pin_limit, self._room = half_life, pin_limit, room
        self._lock = threading.Lock()
        self._warned = False
        self.warm_up: WarmUp | None = None
        """The last one, running or over."""

    def heat(self, profile: str | None) -> list[float]:
        """By expert id: a profile's chances, or how hot each is now. ProfileNotFoundError."""
        if profile:
            return self.profiles.get(profile).chances()
        return self.steering.cache.scores()

    def select(self, selection: Selection) -> list[int]:
        """Expert ids, hottest first. RequestError when the selection is empty."""
        chosen = choose(selection, self.steering.layout, self.heat(selection.profile))
        if not chosen:
            raise RequestError("no expert is meant by that", hint="see `expertd profile show` for what a profile knows")
        return chosen

    def pin(self, selection: Selection) -> dict[str, Any]:
        """Locks what the pin budget and the limit on locked memory allow, hottest first."""
        chosen = self.select(selection)
        job, skipped = self.begin_pin(chosen)
        _wait(job.ticket)
        if job.refused:
            skipped.append(self._skip(job.refused, job.why))
        return {
            "pinned": self._part(job.got), "skipped": [s.json() for s in skipped], "locked_bytes": locked_by_kernel(),
            **self._totals(),
        }  # fmt: skip

    def begin_pin(self, experts: Sequence[int]) -> tuple[PinJob, list[Skip]]:
        """Starts to lock those of `experts` that are not pinned; what the budget does not allow comes back."""
        steering, sizes = self.steering, self.steering.layout.expert_sizes
        pinned, pinned_bytes = steering.read(lambda c: ([c.is_pinned(e) for e in experts], c.pinned_bytes))
        fresh = [e for e, done in zip(experts, pinned, strict=True) if not done]
        room = self._pin_limit() - pinned_bytes
        fitting: list[int] = []
        for expert in fresh:
            if sizes[expert] > room:
                break
            room -= sizes[expert]
            fitting.append(expert)
        steering.drop_strays(fitting)
        steering.act(lambda cache: cache.pin(fitting), fetch=False)
        states = steering.read(lambda cache: [cache.is_pinned(e) for e in fitting])
        accepted = [e for e, there in zip(fitting, states, strict=True) if there]
        skipped = []
        if beyond := fresh[len(fitting) :]:
            skipped.append(self._skip(beyond, f"beyond the pin budget of {format_size(self._pin_limit())}"))
        if left := [e for e, there in zip(fitting, states, strict=True) if not there]:
            skipped.append(self._skip(left, "the cache's budget is full of pins"))
        job = PinJob(steering, accepted)
        job.ticket = steering.worker.submit(Kind.PIN, self._watched(job))
        return job, skipped

    def _watched(self, job: PinJob) -> Iterator[None]:
        yield from job.steps()
        if job.refused and not self._warned:
            self._warned = True
            wanted = self._skip(job.experts, "").nbytes
            got = self._skip(job.got, "").nbytes
            log.warning("pinned %s of %s wanted: %s", format_size(got), format_size(wanted), job.why)

    def unpin(self, selection: Selection) -> dict[str, Any]:
        """Gives pins up; the experts stay resident. Nothing narrowed down means all pins."""
        given = self.steering.unpin(None if selection.everything else self.select(selection))
        self.steering.worker.drain(_WAIT_SECONDS)
        return {"unpinned": self._part(given), "locked_bytes": locked_by_kernel(), **self._totals()}

    def evict(self, selection: Selection, *, everything: bool = False) -> dict[str, Any]:
        """Drops experts from memory, pinned or not. RequestError when nothing was narrowed down unless all is meant."""
        if selection.everything and not everything:
            raise RequestError("say which experts to evict", hint="a profile, layers, a share, experts, or all of them")
        self.steering.drop_strays()
        gone = self.steering.evict(self.select(selection))
        self.steering.worker.drain(_WAIT_SECONDS)
        return {"evicted": self._part(gone), **self._totals()}

    def start_warm(self, order: WarmOrder, *, dense: bool = True) -> WarmUp:
        """Begins a warm-up; `finish_warm` waits for it. One that stands aside is ended for one that somebody asks for.
        StateError while another runs, ProfileNotFoundError, RequestError."""
        if order.level not in warmup.LEVELS[1:]:
            raise RequestError(f"{order.level!r} is no level", hint="one of dense, profile, all", param="level")
        with self._lock:
            self._end_aside()
            if self.warm_up is not None and not self.warm_up.finished:
                raise StateError("a warm-up is running", hint="wait for it, or end it first")
            self.warm_up = made = self._plan(order, dense)
            made.ticket = self.steering.worker.submit(Kind.WARM, _told(made))
            return made

    def _end_aside(self) -> None:
        if (made := self.warm_up) is not None and made.order.aside and made.ticket is not None:
            made.cancel()
            made.ticket.wait(_WAIT_SECONDS)

    def _plan(self, order: WarmOrder, dense: bool) -> WarmUp:
        name = order.profile or self.profiles.default
        chances: list[float] | None = None
        if order.level != "dense":
            chances = self._adopt_profile(name, named=order.profile is not None)
        heat = chances or self.heat(None)
        budget, pinned = self.steering.read(lambda c: (c.budget_bytes, c.pinned()))
        sizes = self.steering.layout.expert_sizes
        # What is pinned besides stays, so that its bytes are not to be had.
        wanted = budget if order.budget_bytes is None else min(budget, order.budget_bytes)
        room = min(wanted, self._room())
        bound = "the budget" if room == wanted else "the budget less what requests will need"
        room = max(0, room - sum(sizes[e] for e in pinned if not heat[e]))
        experts, left = warmup.choose(self.steering.layout, heat, level=order.level, room_bytes=room, bound=bound)
        if any(self.steering.read(lambda c: [not c.is_resident(e) for e in experts])):
            self.steering.drop_strays(experts)
        return WarmUp(self.steering, order, name if chances else "", experts, dense, [left] if left else [])

    def _adopt_profile(self, name: str, *, named: bool) -> list[float] | None:
        """Makes the cache rank by a profile, whatever was hot before; its chances, or None where it is blank."""
        if not named and name not in self.profiles.names():
            return None
        profile = self.profiles.get(name)
        if profile.blank:
            if named:
                raise StateError(f"profile {name} has learnt nothing yet", hint="run some prompts, or import one")
            return None
        scores = warmup.scores_of(profile, self._half_life)
        live = self.heat(None)
        faint = min((s for s in scores if s > 0.0), default=1.0) / 1e3
        self.steering.rank_by([s or (faint if old else 0.0) for s, old in zip(scores, live, strict=True)])
        return profile.chances()

    def finish_warm(self, made: WarmUp, seconds: float | None = None) -> bool:
        """Waits for it, pins where that was asked for. False when the time was too short."""
        assert made.ticket is not None
        if not made.ticket.wait(seconds):
            return False
        if made.order.pin and not made.cancelled and made.resident is not None:
            job, skipped = self.begin_pin(made.experts)
            _wait(job.ticket)
            if job.refused:
                skipped.append(self._skip(job.refused, job.why))
            made.locked_bytes = self._skip(job.got, "").nbytes
            made.skipped += [Skip(f"locks of {s.what}", s.nbytes, s.why) for s in skipped]
        return True

    def _skip(self, experts: Sequence[int], why: str) -> Skip:
        sizes = self.steering.layout.expert_sizes
        return Skip(f"{len(experts)} experts", sum(sizes[e] for e in experts), why)

    def _part(self, experts: Sequence[int]) -> dict[str, int]:
        return {"experts": len(experts), "bytes": self._skip(experts, "").nbytes}

    def _totals(self) -> dict[str, Any]:
        pinned, nbytes, resident = self.steering.read(lambda c: (len(c.pinned()), c.pinned_bytes, c.resident_bytes))
        return {
            "pinned_total": {"experts": pinned, "bytes": nbytes},
            "pin_limit_bytes": self._pin_limit(), "resident_bytes": resident,
        }  # fmt: skip


def _told(made: WarmUp) -> Iterator[float | None]:
    """Its steps, and a line in the log at their end."""
    yield from made.steps()
    found = made.report()
    there = "unknown" if found["resident_bytes"] is None else format_size(found["resident_bytes"])
    log.info(
        "warmed: %s of %s resident after %s, read at %s/s; %s", there, format_size(made.target_bytes),
        format_seconds(made.seconds), format_size(found["bytes_per_second"]),
        "; ".join(f"{s['what']}: {s['why']}" for s in found["skipped"]) or "nothing was left out",
    )  # fmt: skip


def _wait(ticket: Ticket | None) -> None:
    if ticket is not None:
        ticket.wait(_WAIT_SECONDS)
        if ticket.error is not None:
            raise StateError(f"the pager failed: {ticket.error}", hint="see the log")
