"""What a receipt says of the disk: time that the engine's thread stood still, measured on threads that stand or run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from expertd.runtime import meter
from expertd.server.render.common import receipt
from tests.runtime.conftest import Serve, answer


def _in_a_thread(work: Callable[[], object]) -> float:
    found: list[float] = []

    def run() -> None:
        before = meter.stood_seconds()
        work()
        after = meter.stood_seconds()
        assert before is not None
        assert after is not None
        found.append(after - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def _run_for(cpu_seconds: float) -> None:
    end = time.thread_time() + cpu_seconds
    while time.thread_time() < end:
        pass


@pytest.fixture(autouse=True)
def _accounted() -> None:
    if meter.stood_seconds() is None:
        pytest.skip("this kernel has no /proc/thread-self/schedstat")


def test_a_thread_that_stands_is_told_from_one_that_runs() -> None:
    stood = _in_a_thread(lambda: time.sleep(0.5))
    assert stood >= 0.45
    assert _in_a_thread(lambda: _run_for(0.3)) < stood / 2


def test_what_the_kernel_does_not_tell_is_unknown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(meter, "_SCHEDULER", tmp_path / "schedstat")

    async def check() -> None:
        async with serve(budget_share=0.5) as service:
            _, finished = await answer(service, "The sea", 4)
            assert finished.receipt.io_wait_ms is None
            assert finished.receipt.expert_requests > 0
            told = receipt(finished)
            assert told["io_wait_ms"] is None
            assert told["bytes_read"] >= 0

    asyncio.run(check())


def test_pages_that_must_come_from_the_disk_are_waited_for(serve: Serve, big_model: Path) -> None:
    """The pages are taken behind the cache's back, so nothing fetches them and each comes by a fault."""

    async def check() -> None:
        async with serve(big_model, budget_share=1.0, lock_dense=False) as service:
            await answer(service, "The old house by the river was", 8, ignore_eos=True)
            assert service.steering is not None
            service.steering.pager.drop_files()
            began = time.monotonic()
            _, finished = await answer(service, "The old house by the river was", 8, ignore_eos=True)
            spent = (time.monotonic() - began) * 1000
        found = finished.receipt
        if not found.major_faults:
            pytest.skip("the model's pages cannot be dropped here, or its disk is memory")
        assert found.io_wait_ms is not None
        assert 0 < found.io_wait_ms <= spent
        assert found.bytes_read > 0

    asyncio.run(check())
