"""Looks after a session several times a second: the budget follows the memory there is, pins follow budget and routing,
the model file stays itself.

A thread of its own, since reading the kernel's files may wait while the machine is under pressure. What the budget
should be is decided in `pages.budget`, what goes when it shrinks in the cache, what is pinned by itself in `pinning`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from expertd.errors import ModelChangedError
from expertd.pages.budget import BudgetController, Sampler
from expertd.runtime.actions import Actions, PinJob
from expertd.runtime.pinning import WINDOW_TOKENS, AutoPins, RouteWindow
from expertd.runtime.session import Session
from expertd.units import format_size

log = logging.getLogger("expertd.keeper")

SECONDS = 0.25
_CHECK_FILE_EVERY = 4
_SAY_SHARE = 0.10


class Keeper:
    """`start` once, `stop` once. `on_lost` is called, in this thread, when the model file is no longer what it was."""

    def __init__(
        self, session: Session, on_lost: Callable[[ModelChangedError], None], actions: Actions, window: RouteWindow
    ) -> None:
        assert session.steering is not None
        assert session.mapping is not None
        assert session.growth is not None
        self._steering, self._mapping = session.steering, session.mapping
        self._session, self._on_lost = session, on_lost
        self._growth = session.growth
        self._actions, self._window = actions, window
        self.fixed_bytes: int | None = session.fixed_budget_bytes
        """A budget that was asked for; None follows the machine."""
        layout = self._steering.layout
        self._controller = BudgetController(
            floor_bytes=layout.token_nbytes,
            ceiling_bytes=layout.expert_nbytes,
            step_bytes=max(m.expert_nbytes for m in layout.layers) * layout.n_experts_used,
            pin_budget_bytes=session.pin_budget_bytes,
        )
        self._sampler = Sampler()
        self._auto_pins = AutoPins(layout)
        self._auto_job: PinJob | None = None
        self._said = 0
        self._end = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expertd-keeper", daemon=True)

    @property
    def controller(self) -> BudgetController:
        return self._controller

    @property
    def pin_limit_bytes(self) -> int:
        """Bytes of experts that may be pinned now: by the pin budget, the memory there is, and what one token needs
        besides. Where nobody set a pin budget half of the cache stays free to follow what is asked."""
        budget = self._steering.cache.budget_bytes
        room = budget // 2 if self._session.pins_are_auto else budget
        room = min(room, budget - self._steering.layout.token_nbytes)
        return max(0, min(self._session.pin_budget_bytes, self._controller.pin_limit_bytes, room))

    @property
    def warm_room_bytes(self) -> int:
        """Bytes of experts that may be resident when a request comes: the memory there is. Before the first one, less
        what the engine has reserved for computing and not touched yet; later what requests use shows."""
        return max(0, self._controller.target_bytes - self._growth.left_nbytes())

    @property
    def pinning(self) -> str:
        """Why what is pinned by itself is pinned, or nothing is."""
        return self._auto_pins.why if self._session.pin_budget_bytes else "the pin budget is 0"

    def prompting(self, n_left: int) -> None:
        """A prompt of so many tokens is about to be computed (0: it is done). The budget makes room at once for what
        that will take, not when it is taken: the kernel would choose what goes then. Engine thread."""
        if not n_left:
            self._growth.over()
        elif self._growth.begins(n_left):
            self._wake.set()

    def start(self) -> None:
        self._adjust()
        self._thread.start()

    def stop(self) -> None:
        self._end = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _run(self) -> None:
        ticks = 0
        while True:
            self._wake.wait(SECONDS)
            self._wake.clear()
            if self._end:
                return
            ticks += 1
            try:
                self._adjust()
                self._follow_routing()
                if ticks % _CHECK_FILE_EVERY == 0:
                    self._mapping.check()
            except ModelChangedError as error:
                self._on_lost(error)
                return
            except OSError as error:
                log.warning("the machine's memory cannot be read: %s", error)

    def _adjust(self) -> None:
        """One sample, one decision; obeyed at once."""
        steering = self._steering
        pinned: int = steering.read(lambda cache: cache.pinned_bytes)
        unlocked = max(0, steering.layout.dense_nbytes - self._session.dense_locked_nbytes)
        coming = self._growth.left_nbytes() if self._growth.prompting else 0
        wanted = self._controller.step(self._sampler.sample(pinned, unlocked, coming))
        if self.fixed_bytes is not None:
            wanted = self.fixed_bytes if self.fixed_bytes != steering.cache.budget_bytes else None
        if pinned > self.pin_limit_bytes:
            self._give_pins_up(pinned - self.pin_limit_bytes)
        if self._controller.release_dense and (released := self._session.release_dense()):
            log.warning("memory is nearly gone: %s of dense weights are unlocked", format_size(released))
        if wanted is None:
            return
        steering.act(lambda cache: cache.resize(wanted))
        if abs(wanted - self._said) > _SAY_SHARE * max(self._said, 1):
            log.info("the budget is now %s", format_size(wanted))
            self._said = wanted

    def _follow_routing(self) -> None:
        """Pins of its own accord: asked for once in a window of tokens, and not before the last ones are locked."""
        if self._window.tokens < WINDOW_TOKENS or not self._session.pin_budget_bytes:
            return
        if self._auto_job is not None and (self._auto_job.ticket is None or not self._auto_job.ticket.finished):
            return
        if self._auto_job is not None and self._auto_job.refused:
            self._taken_back(self._auto_job.refused)
            self._auto_job = None
        cache, pins = self._steering.cache, self._auto_pins
        if gone := pins.held.difference(self._steering.read(lambda c: c.pinned())):
            self._taken_back(tuple(gone))  # somebody unpinned them
        others = cache.pinned_bytes - sum(self._steering.layout.expert_sizes[e] for e in pins.held)
        wanted = pins.step(self._window.take(), cache.budget_bytes, self.pin_limit_bytes - max(0, others))
        stats = self._steering.stats
        if wanted.unpin:
            self._steering.unpin(wanted.unpin)
            stats.auto_unpinned += len(wanted.unpin)
            log.info("unpinning %d experts that are hot core no more: %s", len(wanted.unpin), wanted.why)
        if wanted.pin:
            self._auto_job, _ = self._actions.begin_pin(wanted.pin)
            got = self._auto_job.experts
            pins.held.difference_update(set(wanted.pin).difference(got))
            stats.auto_pinned += len(got)
            log.info("pinning %d experts of the hot core: %s", len(got), wanted.why)

    def _give_pins_up(self, nbytes: int) -> None:
        """Unlocks the coldest pins until `nbytes` are free to go."""
        steering, given = self._steering, 0
        scores, pinned = steering.read(lambda cache: (cache.scores(), cache.pinned()))
        gone = []
        for expert in sorted(pinned, key=lambda e: scores[e]):
            if given >= nbytes:
                break
            given += steering.layout.expert_sizes[expert]
            gone.append(expert)
        steering.unpin(gone)
        self._taken_back(gone)
        log.warning("memory is short: %s of pinned experts are given up", format_size(given))

    def _taken_back(self, experts: Sequence[int]) -> None:
        self._steering.stats.auto_unpinned += len(self._auto_pins.held.intersection(experts))
        self._auto_pins.taken_back(experts)
