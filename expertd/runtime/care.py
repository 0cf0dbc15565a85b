"""What a session needs besides its requests: profiles taught and saved, the warm-up at the start, pins, the keeper.

1. `learnt`, before anything is adopted: the profile's scores rank the experts.
2. `opened`, before the first request: the keeper starts, the warm-up of the configured level begins. Where readiness
   requires it, it is waited for here, and one token is computed, so that the first request need not start the engine's
   threads and fetch its memory.
3. `begins` and `ended` around each request: which profile its routes teach.
4. `stop_work`, then `save`: the warm-up and the keeper end, profiles are saved.

1 to 3 are the engine thread's. Where nothing is steered there is nothing to care for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from expertd.cache.expert_cache import DEFAULT_HALF_LIFE
from expertd.engine.requests import GenerationRequest, Sampling
from expertd.errors import ExpertdError, ModelChangedError
from expertd.runtime.actions import Actions
from expertd.runtime.keeper import Keeper
from expertd.runtime.pinning import RouteWindow
from expertd.runtime.profile import Shape
from expertd.runtime.profile_file import ProfileDirectory
from expertd.runtime.profiles import Profiles
from expertd.runtime.session import Report, Session
from expertd.runtime.settings import RuntimeSettings
from expertd.runtime.steering import Steering
from expertd.runtime.tracing import Tracing
from expertd.runtime.warmup import WarmOrder, WarmUp, scores_of

log = logging.getLogger("expertd.care")

_LOOK_SECONDS = 0.05


class Caretaker:
    """Of one service, for the life of its session. `report` is told of progress, `on_lost` of a model file that is no
    longer what it was."""

    def __init__(self, settings: RuntimeSettings, report: Report, on_lost: Callable[[ModelChangedError], None]) -> None:
        self._settings, self._report, self._on_lost = settings, report, on_lost
        self._stopping = False
        self.awaits_rehearsal = False
        """Whether only a rehearsal is missing to be ready."""
        self.profiles: Profiles | None = None
        self.actions: Actions | None = None
        self.keeper: Keeper | None = None

    def learnt(self, session: Session) -> None:
        """Number 1."""
        steering, info, settings = session.steering, session.info, self._settings
        if steering is None:
            return
        layout = steering.layout
        shape = Shape(info.fingerprint, info.id, layout.n_layers, layout.n_experts, max(1, layout.n_experts_used))
        directory = ProfileDirectory(settings.state, info.fingerprint) if settings.state is not None else None
        profiles = self.profiles = Profiles(shape, directory, settings.profile, settings.save_seconds)
        profile = profiles.open()
        half_life = settings.half_life or DEFAULT_HALF_LIFE
        if not profile.blank:
            steering.rank_by(scores_of(profile, half_life))
            log.info("profile %s: learnt from %d tokens", profile.name, profile.tokens)
        steering.observers.append(profiles.observe)
        profiles.start()
        path = settings.trace_path or (settings.state / "routes.trace" if settings.state is not None else None)
        tracing = Tracing(steering, shape, path, settings.trace_bytes)
        self.actions = Actions(steering, profiles, tracing, half_life, self._pin_limit, self._warm_room)
        if settings.trace:
            self._start_trace(tracing)

    def _start_trace(self, tracing: Tracing) -> None:
        try:
            tracing.start()
        except ExpertdError as error:
            log.warning("routes are not recorded: %s", error.line())

    def _pin_limit(self) -> int:
        return self.keeper.pin_limit_bytes if self.keeper is not None else 0

    def _warm_room(self) -> int:
        return self.keeper.warm_room_bytes if self.keeper is not None else 0

    def opened(self, session: Session) -> str:
        """Number 2. Returns the state that follows: ready, or warming until a rehearsal."""
        requires = self._settings.ready_requires
        if session.steering is not None and self.actions is not None:
            self._look_after(session, session.steering, self.actions, wait=requires != "loaded")
        if requires == "rehearsed":
            self._report("rehearsal", 0, 0)
            self.awaits_rehearsal = True
            return "warming"
        return "ready"

    def _look_after(self, session: Session, steering: Steering, actions: Actions, *, wait: bool) -> None:
        window = RouteWindow(steering.layout)
        steering.observers.append(window.observe)
        self.keeper = Keeper(session, self._on_lost, actions, window)
        self.keeper.start()
        made = self._begin_warm(actions)
        if wait and made is not None:
            self._wait(made, actions)
        if wait and not self._stopping:
            _compute_a_token(session)

    def _begin_warm(self, actions: Actions) -> WarmUp | None:
        """The session has brought the dense weights in already."""
        level = self._settings.warm_level
        if level not in ("profile", "all"):
            return None
        try:
            return actions.start_warm(WarmOrder(level, aside=True), dense=False)
        except ExpertdError as error:
            log.warning("nothing was warmed: %s", error.line())
            return None

    def _wait(self, made: WarmUp, actions: Actions) -> None:
        while not actions.finish_warm(made, _LOOK_SECONDS):
            self._report("warm", made.done_bytes, made.target_bytes)
            if self._stopping:
                made.cancel()
        self._report("warm", made.done_bytes, made.target_bytes)

    def begins(self, request: GenerationRequest) -> None:
        """Number 3."""
        self._serves(True)
        if self.profiles is not None:
            self.profiles.begin(request.profile)

    def prompting(self, n_left: int) -> None:
        if self.keeper is not None:
            self.keeper.prompting(n_left)

    def _serves(self, serving: bool) -> None:
        if self.actions is not None:
            self.actions.steering.serving = serving

    def ended(self, n_tokens: int) -> None:
        self._serves(False)
        if self.keeper is not None:
            self.keeper.prompting(0)
        if self.profiles is not None:
            self.profiles.end(n_tokens)

    def stop_work(self) -> None:
        """Number 4, before the session closes."""
        self._stopping = True
        if self.actions is not None and self.actions.warm_up is not None:
            self.actions.warm_up.cancel()
        if self.actions is not None:
            self.actions.tracing.stop("the daemon ended")
        if self.keeper is not None:
            self.keeper.stop()

    def save(self) -> None:
        """Number 4, once no request teaches any more; may wait for a disk."""
        if self.profiles is not None:
            self.profiles.stop()


def _compute_a_token(session: Session) -> None:
    """Teaches no profile: nothing is learnt before `begins`."""
    prompt = tuple(session.model.tokenize("a", add_special=True, parse_special=False))
    request = GenerationRequest(prompt, 1, Sampling(temperature=0.0), ignore_eos=True, cache_prompt=False)
    try:
        for _ in session.generation.run(request):
            pass
    except ExpertdError as error:
        log.warning("no token could be computed: %s", error.line())
