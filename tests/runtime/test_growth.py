"""What a prompt will make the process grow by, on a process made of numbers; and that the budget makes room for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from expertd.pages import memory
from expertd.runtime.growth import Growth
from tests.runtime.conftest import Serve, answer

KIB = 1 << 10


class Process:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 1 << 30
        monkeypatch.setattr(memory, "anon_nbytes", lambda: self.nbytes)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_before_the_first_prompt_it_is_the_whole_buffer(process: Process) -> None:
    growth = Growth(lambda n: n * KIB, 512)
    assert growth.left_nbytes() == 512 * KIB
    process.nbytes += 100 * KIB
    assert growth.left_nbytes() == 412 * KIB
    assert not growth.prompting


def test_a_prompt_takes_by_its_width_and_a_wider_one_what_it_adds(process: Process) -> None:
    growth = Growth(lambda n: n * KIB, 512)
    assert growth.begins(100)
    assert growth.left_nbytes() == 100 * KIB
    process.nbytes += 60 * KIB
    assert growth.left_nbytes() == 40 * KIB
    growth.over()
    assert growth.left_nbytes() == 0
    assert not growth.begins(80)
    assert growth.begins(5000)
    assert growth.left_nbytes() == 412 * KIB, "a micro-batch is no wider than it is"
    growth.over()
    assert not growth.prompting


def test_the_budget_makes_room_when_a_prompt_begins(
    serve: Serve, big_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def budgets() -> tuple[int, int, int]:
        async with serve(big_model) as service:
            steering, session = service.steering, service.session
            assert steering is not None
            assert session is not None
            assert session.growth is not None
            before = steering.cache.budget_bytes
            # More than the machine has, whatever that is.
            monkeypatch.setattr(session.growth, "_compute", lambda n: n << 50)
            during: list[int] = []
            steering.observers.append(lambda layer, ids, phase: during.append(steering.cache.budget_bytes))
            await answer(service, "The old house by the river was empty. " * 30, 4)
            for _ in range(100):
                if steering.cache.budget_bytes == before:
                    break
                await asyncio.sleep(0.05)
            return before, min(during), steering.cache.budget_bytes

    before, during, after = asyncio.run(budgets())
    assert during < before // 2
    assert after == before
