"""A request is never slower because of a warm-up: it goes first, has its memory, and finds its experts mapped."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from expertd.bench import pagecache
from expertd.pages import libc
from expertd.runtime.service import Service
from expertd.runtime.steering import Steering
from expertd.runtime.warmup import WarmOrder, WarmUp
from tests.runtime.conftest import answer
from tests.warm_daemon.conftest import CODE, Serve

pytestmark = pytest.mark.linux65


def _steering(service: Service) -> Steering:
    assert service.steering is not None
    return service.steering


def _mapped(steering: Steering, expert: int) -> bool:
    """Whether this process has all of the expert's pages in its page table."""
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for e in steering.layout.extents(expert):
            base = steering.pager.mapping.files[e.file].base
            first, last = (base + e.offset) // libc.PAGE, (base + e.end - 1) // libc.PAGE
            entries = os.pread(table.fileno(), 8 * (last - first + 1), 8 * first)
            if not all(entries[i + 7] & 0x80 for i in range(0, len(entries), 8)):
                return False
    return True


def test_what_was_warmed_is_mapped(serve: Serve) -> None:
    async def warm() -> None:
        async with serve(budget_share=0.5, warm_level="dense") as service:
            steering = _steering(service)
            made = service.actions.start_warm(WarmOrder("all"))
            assert await asyncio.to_thread(service.actions.finish_warm, made, 60)
            there = [e for e in made.experts if steering.cache.is_resident(e)]
            assert len(there) == len(made.experts) > 200
            assert all(_mapped(steering, e) for e in there)

    asyncio.run(warm())


def test_one_that_stands_aside_reads_nothing_while_a_request_is_computed(serve: Serve) -> None:
    async def warm() -> None:
        async with serve(budget_share=0.5, warm_level="dense") as service:
            steering, actions = _steering(service), service.actions
            steering.serving = True
            made = actions.start_warm(WarmOrder("all", aside=True))
            for _ in range(3000):
                if made.phase == "experts":
                    break
                await asyncio.sleep(0.02)
            for _ in range(10):
                steering.evict([0])
                await asyncio.sleep(0.02)
            assert (made.phase, made.progress.read_bytes, made.finished) == ("experts", 0, False)
            asked = actions.start_warm(WarmOrder("all"))
            assert made.cancelled
            assert await asyncio.to_thread(actions.finish_warm, asked, 60), "one that is asked for goes beside requests"
            steering.serving = False
            again = actions.start_warm(WarmOrder("all", aside=True))
            assert await asyncio.to_thread(actions.finish_warm, again, 60)
            assert again.report()["resident_bytes"] == again.target_bytes

    asyncio.run(warm())


def test_a_request_in_the_middle_of_it_finds_no_expert_that_is_only_promised(serve: Serve, model: Path) -> None:
    if pagecache.drop([model]):
        pytest.skip("the file system under the temporary directory does not drop pages (tmpfs)")

    async def warm() -> None:
        async with serve(budget_share=0.5, warm_level="dense") as service:
            steering = _steering(service)
            assert steering.worker.drain(10)
            experts = list(range(0, 512, 3))
            made = WarmUp(steering, WarmOrder("all", aside=True), "", experts, dense=False)
            steps = made.steps()
            while not made.progress.read_bytes:
                next(steps)
            assert all(steering.cache.is_resident(e) for e in experts), "a batch is promised as a whole"
            steering.serving = True
            while next(steps) is None:
                pass
            resident = [e for e in experts if steering.cache.is_resident(e)]
            assert len(resident) < len(experts)
            assert (await asyncio.to_thread(lambda: list(made._missing(resident)))) is not None
            steering.serving = False
            for _ in steps:
                pass
            assert made.report()["experts"] == {"target": len(experts), "resident": len(experts)}
            assert made.done_bytes == made.target_bytes
            assert (await answer(service, CODE[0], 4))[0]

    asyncio.run(warm())


def test_room_is_left_for_what_a_request_allocates(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def warm() -> None:
        async with serve(budget_share=1.0, warm_level="dense") as service:
            session = service.session
            assert session is not None
            assert session.growth is not None
            assert session.growth.left_nbytes() > 0
            monkeypatch.setattr(session.growth, "_due", 1 << 60)
            made = service.actions.start_warm(WarmOrder("all"))
            assert made.experts == []
            assert "what requests will need" in made.report()["skipped"][0]["why"]
            assert await asyncio.to_thread(service.actions.finish_warm, made, 60)
            await answer(service, CODE[0], 8)
            made = service.actions.start_warm(WarmOrder("all"))
            assert len(made.experts) == 512, "what a request took shows in the memory there is"
            assert await asyncio.to_thread(service.actions.finish_warm, made, 60)

    asyncio.run(warm())
