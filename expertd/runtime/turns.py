"""What the requests that wait need of the experts, and which of them goes next (`server.order = "overlap"`).

All of it is the engine thread's: `choose` is called each time a request is taken from the queue, when the one before
has ended. So it also learns there: the experts that the last answer used are kept with its conversation's tokens.

What a request needs, the first that is known:
1. the last answer of its conversation: the one whose tokens its prompt continues;
2. the hottest experts of the profile that it names.

The choice itself is `cache.turns`'s.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from expertd.cache.turns import Waiting, choose, overlap
from expertd.engine.conversations import common_prefix
from expertd.engine.requests import GenerationRequest
from expertd.errors import ExpertdError
from expertd.runtime.admission import MOST_OVERTAKEN, MOST_SECONDS, Job
from expertd.runtime.profiles import Profiles
from expertd.runtime.session import Session
from expertd.types import Phase

_MOST_CONVERSATIONS = 64
_LEAST_TOKENS = 16
"""A shorter beginning is the template's and tells no conversation from another."""
_MOST_EXPERTS = 1024

Uses = Mapping[int, int]
"""Uses by expert id."""


class Turns:
    """`session` and `profiles` are asked when a request is taken; before there is a session, order of arrival holds."""

    def __init__(self, session: Callable[[], Session | None], profiles: Callable[[], Profiles | None]) -> None:
        self._session, self._profiles = session, profiles
        self._attached = False
        self._n_experts = 0
        self._now: Counter[int] = Counter()
        """Of the answer that runs, or ran last."""
        self._known: OrderedDict[bytes, tuple[Sequence[int], Uses]] = OrderedDict()

    def choose(self, jobs: Sequence[Job], now: float) -> int:
        """The index of the job that goes next; `now` by time.monotonic."""
        session = self._session()
        steering = session.steering if session is not None else None
        if session is None or steering is None:
            return 0
        if not self._attached:
            self._attached, self._n_experts = True, steering.layout.n_experts
            steering.observers.append(self._observe)
        self._keep(session.conversations.tokens)
        if len(jobs) == 1:
            return 0
        states = steering.read(lambda cache: cache.states())
        rows = []
        for job in jobs:
            if job.uses is None:
                job.uses = self._uses(job.request)
            share = overlap(job.uses, lambda expert: states[expert] != 0)
            rows.append(Waiting(share, job.overtaken, now - job.queued_at))
        return choose(rows, MOST_OVERTAKEN, MOST_SECONDS)

    def _observe(self, layer: int, ids: Sequence[int], phase: Phase) -> None:
        """A route; prompts touch nearly every expert and tell nothing."""
        if phase is Phase.DECODE:
            base = layer * self._n_experts
            self._now.update(base + i for i in ids)

    def _keep(self, tokens: Sequence[int]) -> None:
        """The answer that was counted belongs to the conversation that is in the context now; what was known of its
        beginning is older and goes."""
        uses, self._now = self._now, Counter()
        if not uses or len(tokens) < _LEAST_TOKENS:
            return
        held = array("i", tokens)
        for key, (before, _) in list(self._known.items()):
            if common_prefix(before, held) == len(before):
                del self._known[key]
        self._known[held.tobytes()] = (held, dict(uses.most_common(_MOST_EXPERTS)))
        while len(self._known) > _MOST_CONVERSATIONS:
            self._known.popitem(last=False)

    def _uses(self, request: GenerationRequest) -> Uses:
        longest, found = 0, Counter[int]()
        prompt = array("i", request.prompt)
        for tokens, uses in self._known.values():
            n = common_prefix(tokens, prompt)
            # Conversations may begin alike (a system prompt): half of what is known must be continued.
            if n > longest and n >= max(_LEAST_TOKENS, len(tokens) // 2):
                longest, found = n, Counter(uses)
        return found or self._of_profile(request.profile)

    def _of_profile(self, name: str | None) -> Uses:
        profiles = self._profiles()
        if not name or profiles is None:
            return {}
        try:
            counts = profiles.get(name).counts
        except ExpertdError:
            return {}
        hottest = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)[:_MOST_EXPERTS]
        return {expert: round(counts[expert]) for expert in hottest if counts[expert] >= 0.5}
