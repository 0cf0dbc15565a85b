"""The pager's thread: what goes first, what is taken back, what survives an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from expertd.pages import residency
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.worker import Kind, PagerWorker
from expertd.types import ExpertLayout


@pytest.fixture
def worker(small: ExpertLayout) -> Iterator[PagerWorker]:
    with MappedFiles.map(small.files) as mapping:
        pager = Pager(small, mapping)
        pager.drop_files()
        worker = PagerWorker(pager)
        yield worker
        worker.stop()
        pager.close()


class Gate:
    """A job that holds the thread until it is opened."""

    def __init__(self, worker: PagerWorker) -> None:
        self._begun, self._open = threading.Event(), threading.Event()
        self.ticket = worker.submit(Kind.PIN, self._steps())
        self._begun.wait(5)

    def _steps(self) -> Iterator[None]:
        self._begun.set()
        self._open.wait(5)
        yield

    def open(self) -> None:
        self._open.set()


def test_evictions_go_first_and_in_one_batch(worker: PagerWorker) -> None:
    order: list[str] = []
    worker.start()
    gate = Gate(worker)
    worker.submit(Kind.WARM, (order.append("warm") for _ in range(1)))
    worker.submit(Kind.PIN, (order.append("pin") for _ in range(1)))
    worker.pager.drop_released = lambda experts: order.append(f"evict {len(experts)}") or 0  # type: ignore[method-assign]
    worker.pager.prefetch = lambda experts: order.append("prefetch")  # type: ignore[method-assign]
    worker.prefetch([3])
    worker.evict([1])
    worker.evict([2, 4])
    gate.open()
    assert worker.drain(5)
    assert order == ["evict 3", "prefetch", "pin", "warm"]
    assert worker.counters.evict_batches == 1


@pytest.mark.linux65
def test_reads_evicts_and_reads_again(worker: PagerWorker) -> None:
    worker.start()
    worker.prefetch([1, 2, 9])
    assert worker.drain(5)
    worker.pager.wait([1, 2, 9])
    worker.evict([2])
    assert worker.drain(5)
    assert residency.resident_experts(worker.pager.mapping, worker.pager.layout) == [1, 9]
    assert worker.counters.prefetched_experts == 3


def test_an_expert_that_is_fetched_again_is_not_dropped(worker: PagerWorker) -> None:
    worker.start()
    worker.pager.fetch([5])
    gate = Gate(worker)
    worker.evict([5])
    worker.pager.fetch([5])
    gate.open()
    assert worker.drain(5)
    assert worker.pager.counters.evicted_experts == 0


def test_reads_that_were_not_begun_can_be_forgotten(worker: PagerWorker) -> None:
    worker.start()
    gate = Gate(worker)
    worker.prefetch([1, 2])
    worker.prefetch([3])
    assert worker.waiting >= 3
    assert worker.cancel_prefetches() == [1, 2, 3]
    gate.open()
    assert worker.drain(5)
    assert worker.counters.prefetch_dropped == 3
    assert worker.counters.prefetched_experts == 0


def test_a_job_is_cancelled_between_its_steps(worker: PagerWorker) -> None:
    steps: list[int] = []
    started = threading.Event()

    def endless() -> Iterator[None]:
        while True:
            steps.append(1)
            started.set()
            yield

    worker.start()
    ticket = worker.submit(Kind.WARM, endless())
    assert started.wait(5)
    ticket.cancel()
    assert ticket.wait(5)
    assert ticket.cancelled
    assert ticket.error is None
    assert worker.drain(5)


def test_the_thread_outlives_an_error_which_its_ticket_keeps(worker: PagerWorker) -> None:
    def fails() -> Iterator[None]:
        yield
        raise OSError("no more")

    worker.start()
    bad = worker.submit(Kind.WARM, fails())
    good = worker.submit(Kind.WARM, iter([None, None]))
    assert bad.wait(5)
    assert good.wait(5)
    assert str(bad.error) == "no more"
    assert good.error is None
    assert (worker.counters.failed, worker.counters.jobs) == (1, 1)
    worker.pager.drop_released = None  # type: ignore[method-assign,assignment]
    worker.evict([1])
    assert worker.drain(5)
    assert worker.counters.failed == 2


def test_a_stop_cancels_what_waits(worker: PagerWorker) -> None:
    worker.start()
    gate = Gate(worker)
    waiting = worker.submit(Kind.WARM, iter([None]))
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    gate.open()
    stopper.join(5)
    assert waiting.wait(1)
    assert waiting.cancelled
    late = worker.submit(Kind.PIN, iter([None]))
    assert late.finished
    assert late.cancelled


@pytest.mark.root
def test_pins_and_unpins_on_the_thread(worker: PagerWorker) -> None:
    worker.start()
    assert worker.pin([0, 1, 2], at_once=2).wait(5)
    assert worker.pager.pinned == {0, 1, 2}
    assert worker.unpin([1]).wait(5)
    assert worker.pager.pinned == {0, 2}
    assert worker.lock_extents(worker.pager.layout.dense).wait(5)


def test_a_job_that_rests_lets_what_is_urgent_through_and_ends_when_cancelled(worker: PagerWorker) -> None:
    dropped = threading.Event()

    def drop(experts: object) -> int:
        dropped.set()
        return 0

    worker.pager.drop_released = drop  # type: ignore[method-assign]

    def resting() -> Iterator[float]:
        while True:
            yield 600.0

    worker.start()
    ticket = worker.submit(Kind.WARM, resting())
    while not worker.counters.steps:
        assert not ticket.finished
    worker.evict([1])
    assert dropped.wait(30)
    ticket.cancel()
    worker.evict([2])
    assert ticket.wait(30)


def test_what_was_dropped_elsewhere_is_looked_at_again(worker: PagerWorker) -> None:
    """Even by a thread that had nothing to do and waited without end."""
    seen = threading.Event()
    dropped: list[int] = []

    def drop(experts: list[int]) -> int:
        dropped.extend(experts)
        seen.set()
        return 0

    worker.pager.drop_released = drop  # type: ignore[method-assign,assignment]
    worker.start()
    assert worker.drain(5)
    worker.look_again([3, 5])
    assert seen.wait(10)
    assert dropped == [3, 5]


def test_waiting_evictions_can_be_taken_over(worker: PagerWorker) -> None:
    worker.start()
    gate = Gate(worker)
    assert worker.evict([1]) == 1
    assert worker.evict([2, 4]) == 3
    assert worker.take_evictions() == [1, 2, 4]
    gate.open()
    assert worker.drain(5)
    assert worker.counters.evict_batches == 0
