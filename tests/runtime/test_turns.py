"""Who goes next where several wait: by overlap within bounds, and what the daemon knows of those that wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.bench import turns as measured
from expertd.cache.turns import Waiting, choose, overlap
from expertd.engine.requests import GenerationRequest
from expertd.runtime.admission import MOST_OVERTAKEN, MOST_SECONDS, Job, RequestQueue
from expertd.runtime.service import Service
from expertd.runtime.trace_load import load_trace
from expertd.runtime.turns import Turns
from tests.runtime.conftest import Serve, answer

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
CODE = "def merge_intervals(intervals):\n    intervals = sorted(intervals)\n"
ONE_THREAD = {"threads": 1, "threads_batch": 1}
DATA = Path(__file__).resolve().parents[1] / "cache" / "data"


def row(share: float | None, overtaken: int = 0, waited: float = 0.0) -> Waiting:
    return Waiting(share, overtaken, waited)


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        ([row(0.5)], 0),
        ([row(0.2), row(0.9), row(0.5)], 1),
        ([row(0.2), row(0.9), row(0.9)], 1),
        ([row(0.86), row(0.9)], 0),
        ([row(None), row(None)], 0),
        ([row(None), row(0.6)], 1),
        ([row(0.1), row(None)], 0),
        ([row(0.2, overtaken=4), row(0.9)], 0),
        ([row(0.2, waited=10.0), row(0.9)], 0),
        ([row(0.2), row(0.5, overtaken=4), row(0.9)], 1),
        ([row(0.2), row(0.1, overtaken=4), row(0.9)], 0),
    ],
)
def test_the_largest_overlap_goes_within_the_bounds(waiting: list[Waiting], chosen: int) -> None:
    assert choose(waiting, 4, 10.0) == chosen


def test_overlap_counts_uses() -> None:
    assert overlap({1: 3, 2: 1}, lambda e: e == 1) == 0.75
    assert overlap({}, lambda e: True) is None


def job(loop: asyncio.AbstractEventLoop, prompt: tuple[int, ...] = (1,), profile: str | None = None) -> Job:
    return Job(GenerationRequest(prompt, 1, profile=profile), loop)


@settings(deadline=None)
@given(st.data())
def test_nobody_is_overtaken_more_often_than_may_be(data: st.DataObject) -> None:
    """Whatever overlaps are claimed, and whoever comes between."""
    loop = asyncio.new_event_loop()
    try:
        shares = st.one_of(st.none(), st.floats(0, 1))

        def claims(jobs: list[Job], now: float) -> int:
            rows = [Waiting(data.draw(shares), j.overtaken, now - j.queued_at) for j in jobs]
            return choose(rows, MOST_OVERTAKEN, MOST_SECONDS)

        queue = RequestQueue(100, claims)  # type: ignore[arg-type]
        made = []
        for _ in range(data.draw(st.integers(1, 12))):
            made.append(job(loop))
            queue.put(made[-1])
            if data.draw(st.booleans()):
                taken = queue.take()
                assert taken is not None
                queue.finished(taken)
        while queue.waiting():
            assert queue.take() in made
        assert max(j.overtaken for j in made) <= MOST_OVERTAKEN
        assert queue.overtakings == sum(j.overtaken for j in made)
    finally:
        loop.close()


def prompt_of(service: Service, text: str) -> tuple[int, ...]:
    return tuple(service.tokenize(text, add_special=True, parse_special=True))


def only_these_resident(service: Service, uses: dict[int, int]) -> None:
    steering = service.steering
    assert steering is not None
    steering.evict([e for e in steering.read(lambda cache: cache.resident()) if e not in uses])


def test_a_conversation_is_known_by_its_last_answer_and_a_name_by_its_profile(serve: Serve) -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        async with serve(budget_share=1.0, policy="lru", engine=ONE_THREAD) as service:
            turns = Turns(lambda: service.session, lambda: service.profiles)
            nothing = [job(loop, prompt_of(service, CODE)), job(loop, prompt_of(service, CHAT))]
            assert turns.choose(nothing, 0.0) == 0, "nothing is known of either"
            replies = {}
            for text, name in ((CHAT, "talk"), (CODE, "program")):
                reply, _ = await answer(service, text, 40, profile=name, ignore_eos=True)
                replies[text] = text + reply
                turns.choose([job(loop)], 0.0)  # as the next one is taken
            for known in (replies, {CHAT: "Another thing. " + CHAT, CODE: "Another thing. " + CODE}):
                chat, code = (prompt_of(service, known[text]) for text in (CHAT, CODE))
                for first, second, one, other in ((code, chat, "program", "talk"), (chat, code, "talk", "program")):
                    jobs = [job(loop, first, one), job(loop, second, other)]
                    assert turns.choose(jobs, 0.0) == 0, "all is resident: nobody has an advantage"
                    uses = jobs[1].uses
                    assert uses
                    only_these_resident(service, dict(uses))
                    assert turns.choose(jobs, 0.0) == 1
                    jobs[0].overtaken = MOST_OVERTAKEN
                    assert turns.choose(jobs, 0.0) == 0
                    await answer(service, CHAT, 2)
                    service.steering.act(lambda cache: cache.admit(range(512)))  # type: ignore[union-attr]
                    turns._now.clear()
            assert not turns._uses(GenerationRequest(prompt_of(service, "Something else entirely"), 1, profile="none"))

    asyncio.run(check())


def test_by_overlap_all_are_served_with_the_same_words(serve: Serve) -> None:
    prompts = [CHAT, CODE, CHAT.replace("France", "Norway"), "#include <stdio.h>\n"]

    async def words(order: str, *, at_once: bool) -> tuple[list[str], int]:
        async with serve(budget_share=0.25, order=order, max_queue=16, engine=ONE_THREAD) as service:
            if not at_once:
                return [(await answer(service, p, 8))[0] for p in prompts], 0
            for p in prompts:
                await answer(service, p, 8)
            both = await asyncio.gather(*(answer(service, p, 8) for p in prompts * 2))
            queue = service._queue
            assert not queue.waiting()
            return [reply for reply, _ in both], queue.overtakings

    expected, overtakings = asyncio.run(words("arrival", at_once=False))
    assert overtakings == 0
    found, _ = asyncio.run(words("overlap", at_once=True))
    assert found == expected * 2


def test_the_measurement_counts_the_same_requests_in_both_orders() -> None:
    traces = [load_trace(DATA / f"{name}.trace") for name in ("chat", "code")]
    in_order, by_overlap = measured.compare(traces, 0.25, turn=24)
    assert (in_order.decode_requests, in_order.turns) == (by_overlap.decode_requests, by_overlap.turns)
    assert in_order.overtakings == 0
    assert 0 < by_overlap.most <= MOST_OVERTAKEN
    assert by_overlap.hits > in_order.hits, "short answers on two topics are where it helps at all"
