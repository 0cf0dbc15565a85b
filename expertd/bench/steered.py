"""The arm that is measured: expertd's own service, from its start to its stop, without HTTP around it.

What a request passes here is what it passes in the daemon: queue, engine thread, tap, expert cache, pager.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from expertd.bench import meter
from expertd.bench.forcing import ForcedRoutes
from expertd.bench.meter import Reading
from expertd.bench.spec import Cache, Kind, RunSpec
from expertd.engine.settings import EngineSettings
from expertd.errors import BenchError
from expertd.runtime.requests import Event, Finished, GenerationRequest, Piece, Sampling
from expertd.runtime.service import Service
from expertd.runtime.session import Session
from expertd.runtime.settings import RuntimeSettings

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.002
_SWITCH_SECONDS = 0.0005
"""As in `daemon.life`, whose event loop and garbage collection this process has too."""


class SteeredArm:
    """Owned by the one thread that runs an arm, whose event loop it has to itself."""

    def __init__(self, spec: RunSpec, forced: ForcedRoutes | None) -> None:
        self._forced = forced
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._settings = RuntimeSettings(
            engine=EngineSettings(
                model=Path(spec.model),
                n_ctx=spec.n_ctx,
                n_batch=spec.n_batch,
                n_ubatch=spec.n_ubatch,
                threads=spec.threads,
            ),
            steering="auto" if spec.arm.kind is Kind.AUTO else "on",
            budget=spec.arm.budget or None,
            policy=spec.arm.policy or "auto",
        )
        self._service: Service | None = None

    @property
    def repacked(self) -> bool:
        return not self._session().choice.steer

    def start(self) -> Reading:
        """Starts the service and waits until it is ready. Returns the cost of llama.cpp's load alone.

        Raises BenchError with the service's own words when it failed, or when routes cannot be forced.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        cost = self._loop.run_until_complete(self._ready())
        session = self._session()
        if self._forced is not None:
            if session.tap is None:
                raise BenchError(
                    f"routes cannot be forced here: {session.choice.why}", hint="leave out the arm auto, or --routes"
                )
            session.tap.rewrite = self._forced.rewrite
        return replace(cost, seconds=session.model.load_seconds)

    async def _ready(self) -> Reading:
        """Starts; returns what was spent when the load gave way to what comes after it, as near as polling sees it."""
        before = meter.read()
        loaded: Reading | None = None
        # Service binds to the running loop, so it is made here.
        self._service = service = Service(self._settings)
        service.start()
        while service.state not in ("ready", "failed"):
            await asyncio.sleep(_POLL_SECONDS)
            if loaded is None and service.progress.what not in ("", "load"):
                loaded = meter.read()
        if service.state == "failed":
            raise BenchError(f"expertd could not start: {service.failure}")
        gc.collect()
        gc.freeze()
        return (loaded or meter.read()).since(before)

    def _session(self) -> Session:
        session = self._service.session if self._service else None
        if session is None:
            raise BenchError("expertd is not started")
        return session

    def tokenize(self, text: str) -> list[int]:
        return self._session().model.tokenize(text, add_special=True, parse_special=False)

    def generate(self, prompt: Sequence[int], n: int) -> Iterator[int]:
        """`n` tokens after `prompt`, each when it reaches the event loop."""
        request = GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=n,
            sampling=Sampling(temperature=0.0),
            ignore_eos=True,
            cache_prompt=False,
        )
        assert self._service is not None
        events = self._service.generate(request)
        try:
            while True:
                event = self._loop.run_until_complete(self._next(events))
                if isinstance(event, Finished):
                    return
                if isinstance(event, Piece):
                    yield from event.tokens
        finally:
            self._loop.run_until_complete(events.aclose())

    @staticmethod
    async def _next(events: AsyncGenerator[Event, None]) -> Event:
        return await anext(events)

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say."""
        return self._session().model.detokenize(tokens, special=True).decode("utf-8", "replace")

    def logits(self) -> bytes:
        """The bits of the logits that the last token was drawn from; the engine is idle after an answer."""
        return self._session().context.logits().tobytes()

    def cache(self) -> Cache:
        """The counters as they are now."""
        session = self._session()
        tap = session.tap.counters if session.tap else None
        steering = session.steering
        counts = Cache(
            tap_seconds=tap.seconds if tap else 0.0,
            splits=tap.splits if tap else 0,
            choice=session.choice.why,
        )
        if steering is None:
            return counts
        found: Cache = steering.read(
            lambda c: Cache(
                requests=c.counters.requests,
                hits=c.counters.hits,
                tap_seconds=counts.tap_seconds,
                splits=counts.splits,
                budget_bytes=c.budget_bytes,
                resident_bytes=c.resident_bytes,
                policy=c.policy_name,
                choice=counts.choice,
            )
        )
        return found

    def close(self) -> None:
        """Stops the service. Raises BenchError when its engine does not end."""
        if self._service is None:
            return
        ended = self._loop.run_until_complete(self._service.stop(_STOP_SECONDS))
        self._loop.close()
        if not ended:
            raise BenchError("expertd's engine did not stop")
