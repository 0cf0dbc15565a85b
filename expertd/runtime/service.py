"""The model behind the server: state, requests and the expert cache, as the event loop sees them.

Lives on the event loop. The engine thread (`worker`) does the work, the pager's thread the page work; only plain reads
and `call_soon_threadsafe` go between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from expertd.engine.generate import check_fits
from expertd.engine.requests import Event, Finished, GenerationRequest, Queued
from expertd.errors import EngineHungError, ExpertdError, ModelChangedError, NotReadyError, StateError
from expertd.runtime import report
from expertd.runtime.actions import Actions
from expertd.runtime.admission import Job, RequestQueue
from expertd.runtime.care import Caretaker
from expertd.runtime.hang import HangWatch, reading_signs
from expertd.runtime.heat import NOTHING, Heat
from expertd.runtime.profiles import Profiles
from expertd.runtime.rehearsal import RehearsalOrder, rehearse
from expertd.runtime.session import ModelInfo, Session, check_budget, open_session, pin_budget, wanted_budget
from expertd.runtime.settings import RuntimeSettings
from expertd.runtime.stats import Stats
from expertd.runtime.steering import Steering
from expertd.runtime.turns import Turns
from expertd.runtime.warmup import WarmOrder
from expertd.runtime.worker import EngineThread
from expertd.units import format_seconds

log = logging.getLogger("expertd.service")

_PROGRESS_SECONDS = 0.2
_HUNG_STOP_SECONDS = 1.0
"""An engine that stands still is not waited for; one that comes back just then may still end by itself."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the load or the warm-up is. `what` is load, dense, warm or empty; units are bytes, or percent of load."""

    what: str = ""
    done: int = 0
    total: int = 0


class Service:
    """`start`, then requests, then `stop`. States: loading, warming, ready, stopping, failed."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.state = "loading"
        self.failure = ""
        self.progress = Progress()
        self.changed = asyncio.Event()
        """Set at each change of the state; `wait_changed` waits for the next one."""
        turns = Turns(lambda: self.session, lambda: self.profiles)
        self._queue = RequestQueue(settings.max_queue, turns.choose if settings.order == "overlap" else None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heat: Heat | None = None
        self._rehearsing = False
        self.hung = False
        """Whether the engine stands still: the process must end, since nothing can take the thread back."""
        self._hang = HangWatch(settings.hang_seconds)
        self._watching: asyncio.Task[None] | None = None
        self._care = Caretaker(settings, self._report, self._on_lost)
        self._engine = EngineThread(
            partial(open_session, settings, self.stats, self._report, self._care.learnt), self._queue, self.stats,
            self._on_change, self._care,
        )  # fmt: skip

    def start(self) -> None:
        """Begins to load, in the engine thread. Call it on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start()
        self._watching = self._loop.create_task(self._watch())

    async def stop(self, seconds: float = 10.0) -> bool:
        """Ends running requests and frees the model. False when the engine did not end in time."""
        if self._watching is not None:
            self._watching.cancel()
        self._set_state("stopping", "")
        self._queue.close(lambda: NotReadyError("expertd is stopping", hint="try again later"))
        await asyncio.to_thread(self._care.stop_work)
        ended = await asyncio.to_thread(self._engine.stop, _HUNG_STOP_SECONDS if self.hung else seconds)
        await asyncio.to_thread(self._care.save)
        return ended

    async def wait_changed(self) -> str:
        """The state, after it has changed once more."""
        await self.changed.wait()
        return self.state

    async def _watch(self) -> None:
        while not self.hung:
            await asyncio.sleep(self._hang.interval_seconds)
            signs = self._engine.signs()
            if self._hang.look(None if signs is None else (*signs, self.progress, *reading_signs())):
                self._give_up()

    def _give_up(self) -> None:
        """The engine hangs. Its request ends with an error, the others with the state."""
        self.hung = True
        job = self._queue.running
        doing = f"the load ({self.state})" if job is None else f"a decode ({report.where(job)})"
        error = EngineHungError(
            f"{doing} stands still: nothing has moved for {format_seconds(self._hang.still_seconds)}",
            hint=f"expertd ends, to be started anew; see whether the disk of {self.settings.engine.model} answers "
            "(dmesg), or raise engine.hang_seconds",
        )
        self.stats.failed += job is not None
        self._engine.abandon(error)
        self._set_state("failed", error.line())

    def _report(self, what: str, done: int, total: int) -> None:
        self.progress = Progress(what, done, total)

    def _on_change(self, state: str, why: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_state, state, why)

    def _set_state(self, state: str, why: str) -> None:
        if self.state in ("stopping", "failed") and state != "stopping":
            return
        self.state, self.failure = state, why or self.failure
        if state == "failed":
            log.error("%s", why)
            self._queue.close(lambda: NotReadyError(why))
        self.changed.set()
        self.changed = asyncio.Event()

    def _on_lost(self, error: ModelChangedError) -> None:
        """From the keeper's thread: what runs computes with weights that are not the model's any more."""
        self._engine.abandon(error)
        self._on_change("failed", error.line())

    def reconfigure(self, settings: RuntimeSettings) -> None:
        """A reload: budget, pin budget and reserve change now; the rest waits for a restart. Raises BudgetError."""
        session, steering = self.session, self.steering
        keeper = self._care.keeper
        if session is None or steering is None or keeper is None:
            return
        check_budget(settings, steering.layout)
        session.fixed_budget_bytes = keeper.fixed_bytes = wanted_budget(settings, steering.layout)
        session.pin_budget_bytes = keeper.controller.pin_budget_bytes = pin_budget(settings, steering.layout)
        session.pins_are_auto = settings.pin_budget is None and settings.pin_budget_share is None

    @property
    def warm_target_nbytes(self) -> int:
        """Bytes that the last warm-up was to bring in; 0 before the first."""
        made = self._care.actions.warm_up if self._care.actions else None
        return made.target_bytes if made else 0

    @property
    def warm_done_nbytes(self) -> int:
        made = self._care.actions.warm_up if self._care.actions else None
        return made.done_bytes if made else 0

    @property
    def actions(self) -> Actions:
        """What can be done to the experts. NotReadyError before the model is loaded, StateError where nothing is
        steered."""
        session, actions = self._loaded(), self._care.actions
        if actions is None:
            raise StateError(f"there are no experts to act on: {session.choice.why}", hint="serve with --steering on")
        return actions

    @property
    def session(self) -> Session | None:
        return self._engine.session

    @property
    def steering(self) -> Steering | None:
        session = self._engine.session
        return session.steering if session else None

    @property
    def profiles(self) -> Profiles | None:
        """None where nothing is steered."""
        return self._care.profiles

    @property
    def model(self) -> ModelInfo | None:
        session = self._engine.session
        return session.info if session else None

    def _loaded(self) -> Session:
        session = self._engine.session
        if session is None or self.state in ("failed", "stopping"):
            raise NotReadyError(
                self.failure or f"the model is not ready: {self.state}", hint="ask /readyz for progress"
            )
        return session

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._loaded().model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> bytes:
        return self._loaded().model.detokenize(ids, special=special)

    def piece(self, token: int) -> bytes:
        return self._loaded().model.piece(token, special=True)

    def apply_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError with the template's message where it refuses."""
        return self._loaded().template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
        )

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Queued*, PromptProgress*, Piece*, Finished. Closing the generator cancels the request within a token.

        Before the first event: NotReadyError, QueueFullError, ContextFullError, RequestError. Later: EngineError.
        """
        return self._generate(request, rehearsal=False)

    async def _generate(self, request: GenerationRequest, *, rehearsal: bool) -> AsyncGenerator[Event, None]:
        session = self._loaded()
        if self.state != "ready" and not (rehearsal and self._care.awaits_rehearsal):
            if self._care.awaits_rehearsal:
                raise NotReadyError("a rehearsal has to meet its targets first", hint="run `expertd rehearse`")
            raise NotReadyError(f"the model is not ready: {self.state}", hint="ask /readyz for progress")
        check_fits(request, session.context.n_ctx)
        if request.profile and self._care.profiles is not None:
            self._care.profiles.check(request.profile)
        job = Job(request, asyncio.get_running_loop())
        try:
            position = self._queue.put(job)
        except ExpertdError:
            self.stats.rejected += 1
            raise
        finished = False
        try:
            if position:
                yield Queued(position)
            while not finished:
                event = await job.events.get()
                if isinstance(event, ExpertdError):
                    finished = True
                    raise event
                finished = isinstance(event, Finished)
                yield event
        finally:
            if not finished and not self._queue.remove(job):
                self._engine.cancel(job)

    async def warm(self, order: WarmOrder) -> AsyncGenerator[dict[str, Any], None]:
        """Progress events, then the result. Closing the generator ends the warm-up after its step. Raises what
        `Actions.start_warm` raises before the first event."""
        actions = self.actions
        made = await asyncio.to_thread(actions.start_warm, order)
        try:
            while not await asyncio.to_thread(actions.finish_warm, made, _PROGRESS_SECONDS):
                yield {"event": "progress", **made.report()}
            yield {"event": "result", **made.report()}
        finally:
            if not made.finished:
                made.cancel()

    async def rehearse(self, order: RehearsalOrder) -> AsyncGenerator[dict[str, Any], None]:
        """See `rehearsal`. A daemon that awaits one is ready once its targets are met. What was learnt is saved.
        StateError while one runs."""
        self._loaded()
        if self._rehearsing:
            raise StateError("a rehearsal is running", hint="wait for it, or end it first")
        self._rehearsing = True
        events = rehearse(_Stage(self), order)
        try:
            async for event in events:
                if event["event"] == "result":
                    await self._rehearsed(event["ok"])
                yield event
        finally:
            self._rehearsing = False
            await events.aclose()

    async def _rehearsed(self, ok: bool) -> None:
        if self._care.profiles is not None:
            await asyncio.to_thread(self._care.profiles.save)
        if ok and self._care.awaits_rehearsal:
            self._care.awaits_rehearsal = False
            self._set_state("ready", "")

    def slots(self) -> list[dict[str, Any]]:
        """The running request and those that wait, in order; nothing of their text."""
        running = self._queue.running
        rows = [report.slot(running, None)] if running else [report.idle_slot()]
        return rows + [report.slot(job, position + 1) for position, job in enumerate(self._queue.waiting())]

    @property
    def queued(self) -> int:
        return len(self._queue.waiting())

    @property
    def running(self) -> bool:
        return self._queue.running is not None

    def cache_report(self) -> dict[str, Any]:
        """The keys of `/expertd/cache`; zeros where nothing is steered."""
        session = self._engine.session
        return report.cache(session.steering if session else None, session.choice.why if session else self.state)

    @property
    def heat(self) -> Heat | None:
        """The picture of the cache; None where nothing is steered."""
        steering = self.steering
        if steering is not None and self._heat is None:
            self._heat = Heat(steering)
        return self._heat

    def heatmap(self) -> Mapping[str, Any]:
        """Layers x experts: how hot, whether resident, pinned or just missed."""
        return self.heat.document() if self.heat else NOTHING


class _Stage:
    """The service as a rehearsal sees it: its requests pass before the daemon is ready."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def actions(self) -> Actions:
        return self._service.actions

    @property
    def steers(self) -> bool:
        return self._service.steering is not None

    def prompt_of(self, text: str) -> tuple[int, ...]:
        """As a chat's only message, where the model has a template for that."""
        service = self._service
        model = service.model
        if model is not None and model.chat_template:
            text = service.apply_template([{"role": "user", "content": text}])
        special = not (model and model.bos and text.startswith(model.bos))
        return tuple(service.tokenize(text, add_special=special, parse_special=True))

    def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        return self._service._generate(request, rehearsal=True)

    def warm(self, order: WarmOrder) -> AsyncGenerator[dict[str, Any], None]:
        return self._service.warm(order)
