"""A topic that changes, through the real cache: routes of one hot set, then of another, on a clock of four tokens a
second, until the change has passed. On a running daemon it is in `test_topic_live`."""

from __future__ import annotations

import random

from expertd.cache.expert_cache import ExpertCache
from expertd.telemetry.readings import Readings
from expertd.telemetry.snapshot import CacheFacts, HistogramData, ModelFacts, RequestFacts, Snapshot
from expertd.telemetry.watch import TICK_SECONDS, Watch
from expertd.types import Phase

LAYERS, EXPERTS, USED, EXPERT_NBYTES = 16, 64, 4, 8 << 20
TOKENS_PER_SECOND = 4


class Machine:
    """A cache that is routed to, and a disk that reads what it misses."""

    def __init__(self) -> None:
        self.budget = LAYERS * EXPERTS * EXPERT_NBYTES // 4
        self.cache = ExpertCache([EXPERT_NBYTES] * (LAYERS * EXPERTS), EXPERTS, self.budget)
        self.tokens = self.read = 0
        self.now = 0.0
        self.watch = Watch(self.snapshot, lambda: Readings(read_nbytes=self.read))
        self.watch.disk_rate = 1.5e9
        self.random = random.Random(7)

    def snapshot(self) -> Snapshot:
        c = self.cache.counters
        total = LAYERS * EXPERTS * EXPERT_NBYTES
        return Snapshot(
            state="ready",
            steering=True,
            model=ModelFacts("m", "a", "f", LAYERS, EXPERTS, USED, total, total // 10, LAYERS * USED * EXPERT_NBYTES),
            cache=CacheFacts(
                requests=c.requests,
                hits=c.hits,
                request_nbytes=c.request_bytes,
                hit_nbytes=c.hit_bytes,
                evictions=dict(c.evictions),
                capacity_nbytes=self.budget,
                resident_nbytes=self.cache.resident_bytes,
            ),
            requests=RequestFacts(
                generated_tokens=self.tokens, inter_token=HistogramData(total=self.tokens / TOKENS_PER_SECOND)
            ),
        )

    def speak(self, topic: int, seconds: float) -> list[str]:
        """Routes of one topic for so long; the causes that were given, one a tick."""
        order = list(range(EXPERTS))
        random.Random(topic).shuffle(order)
        weights = [1 / (rank + 1) ** 1.4 for rank in range(EXPERTS)]
        causes = []
        for _ in range(round(seconds / TICK_SECONDS)):
            for _ in range(round(TICK_SECONDS * TOKENS_PER_SECOND)):
                for layer in range(LAYERS):
                    ids: dict[int, None] = {}
                    while len(ids) < USED:
                        ids[self.random.choices(order, weights)[0]] = None
                    decision = self.cache.route(layer, list(ids), Phase.DECODE)
                    self.read += len(decision.fetch) * EXPERT_NBYTES
                self.tokens += 1
            self.now += TICK_SECONDS
            causes.append(self.watch.tick(self.now).cause)
        return causes


def test_a_change_of_topic_is_named_and_passes() -> None:
    machine = Machine()
    machine.watch.tick(0.0)
    first = machine.speak(1, 120)
    assert set(first[-20:]) == {"compute"}
    second = machine.speak(2, 60)
    assert "topic" in second[:10]
    assert set(second[-5:]) == {"compute"}
