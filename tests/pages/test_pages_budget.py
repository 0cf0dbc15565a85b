"""The budget controller against machines made of numbers: up, down, pressed, pinned (M4, M5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.pages.budget import BudgetController, Sample, Sampler, reserve_for

MIB, GIB = 1 << 20, 1 << 30
STEP = 20 * MIB
CALM = Sample(seconds=0.25, limit_bytes=8 * GIB, available_bytes=4 * GIB, pinned_bytes=0, dense_unlocked_bytes=0)
RESERVE = reserve_for(CALM.limit_bytes, STEP)


def _controller(ceiling: int = 16 * GIB, pins: int = GIB) -> BudgetController:
    return BudgetController(100 * MIB, ceiling, STEP, pins)


def _run(controller: BudgetController, sample: Sample, times: int) -> list[int]:
    return [b for b in (controller.step(sample) for _ in range(times)) if b is not None]


def test_the_first_sample_gives_what_there_is_less_the_reserve() -> None:
    assert _controller().step(CALM) == 4 * GIB - RESERVE


def test_free_memory_is_taken_up_to_all_experts() -> None:
    """M4: nothing is dropped while there is room."""
    controller = _controller(ceiling=3 * GIB)
    assert controller.step(CALM) == 3 * GIB
    assert _run(controller, CALM, 20) == []
    assert controller.pin_limit_bytes == GIB


def test_another_process_takes_half_and_gives_it_back() -> None:
    """M5."""
    controller = _controller()
    controller.step(CALM)
    taken = replace(CALM, available_bytes=2 * GIB)
    assert controller.step(taken) == 2 * GIB - RESERVE
    assert _run(controller, taken, 10) == []
    assert _run(controller, CALM, 5) == [4 * GIB - RESERVE]
    assert (controller.shrinks, controller.grows) == (1, 1)


def test_room_is_made_for_what_a_prompt_is_about_to_take() -> None:
    controller = _controller()
    controller.step(CALM)
    assert controller.step(replace(CALM, coming_bytes=GIB)) == 3 * GIB - RESERVE
    taken = replace(CALM, available_bytes=3 * GIB)
    assert _run(controller, taken, 10) == [], "it was taken as foreseen"


def test_memory_that_is_free_for_a_moment_is_not_taken() -> None:
    controller = _controller()
    _run(controller, CALM, 3)
    assert controller.step(replace(CALM, available_bytes=5 * GIB)) is None
    assert _run(controller, CALM, 5) == []


def test_pins_go_before_the_budget_is_at_its_floor_and_dense_locks_last() -> None:
    controller = _controller()
    controller.step(CALM)
    assert controller.pin_limit_bytes == GIB
    tight = replace(CALM, available_bytes=RESERVE + 300 * MIB)
    controller.step(tight)
    assert controller.pin_limit_bytes == 200 * MIB
    assert not controller.release_dense
    controller.step(replace(tight, available_bytes=10 * MIB))
    assert controller.pin_limit_bytes == 0
    assert controller.budget_bytes == 100 * MIB
    assert controller.release_dense


def test_pinned_experts_are_not_counted_twice() -> None:
    pinned = replace(CALM, available_bytes=3 * GIB, pinned_bytes=GIB)
    assert _controller().step(pinned) == 4 * GIB - RESERVE
    assert _controller().step(replace(CALM, dense_unlocked_bytes=GIB)) == 3 * GIB - RESERVE


def test_refaults_make_room_and_the_room_melts_away() -> None:
    controller = _controller()
    _run(controller, CALM, 3)
    budgets = _run(controller, replace(CALM, refault_bytes=64 * MIB), 3)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] <= 4 * GIB - RESERVE - 3 * 64 * MIB
    assert controller.pressed == 3
    _run(controller, CALM, 300)
    assert controller.margin_bytes == 0
    assert controller.budget_bytes >= (4 * GIB - RESERVE) * 0.994


def test_a_few_refaults_are_borders() -> None:
    controller = _controller()
    assert _run(controller, replace(CALM, refault_bytes=4 * MIB), 50) == [4 * GIB - RESERVE]


def test_stalls_and_swapping_press_too() -> None:
    for pressed in (replace(CALM, stall_seconds=0.1), replace(CALM, swapped_out_bytes=64 * MIB)):
        controller = _controller()
        controller.step(CALM)
        assert controller.step(pressed) is not None
        assert controller.budget_bytes < 4 * GIB - RESERVE


samples = st.builds(
    Sample,
    seconds=st.floats(0, 10),
    limit_bytes=st.integers(64 * MIB, 64 * GIB),
    available_bytes=st.integers(0, 64 * GIB),
    pinned_bytes=st.integers(0, 4 * GIB),
    dense_unlocked_bytes=st.integers(0, 4 * GIB),
    refault_bytes=st.integers(0, GIB),
    swapped_out_bytes=st.integers(0, GIB),
    stall_seconds=st.floats(0, 1),
)


@given(st.lists(samples, min_size=1, max_size=30), st.integers(MIB, 4 * GIB), st.integers(MIB, 64 * GIB))
def test_whatever_comes(given_samples: list[Sample], floor: int, ceiling: int) -> None:
    controller = BudgetController(floor, ceiling, STEP, GIB)
    for i, sample in enumerate(given_samples):
        before = controller.budget_bytes
        budget = controller.step(sample)
        assert budget is not None or i > 0
        assert min(floor, ceiling) <= controller.budget_bytes <= ceiling
        room = sample.available_bytes + sample.pinned_bytes - sample.dense_unlocked_bytes
        if budget is not None and budget > before:
            assert budget <= max(room, floor)
        assert controller.budget_bytes * 0.994 <= max(room, floor)
        assert 0 <= controller.pin_limit_bytes <= GIB
        assert 0 <= controller.margin_bytes <= max(room, 0)


@settings(max_examples=50)
@given(st.integers(200 * MIB, 60 * GIB), st.integers(200 * MIB, 60 * GIB))
def test_it_settles_within_a_percent_of_what_there_is(first: int, then: int) -> None:
    controller = BudgetController(MIB, 64 * GIB, STEP)
    for available in (first, then):
        sample = replace(CALM, available_bytes=available, limit_bytes=64 * GIB)
        _run(controller, sample, 10)
        room = max(MIB, available - reserve_for(sample.limit_bytes, STEP))
        assert abs(controller.budget_bytes - room) <= max(room * 0.006, 1)
        assert _run(controller, sample, 10) == []


def test_a_sampler_reports_what_happened_between_two_looks(tmp_path: Path) -> None:
    def write(available: int, refaults: int, stall: int) -> None:
        for name, text in {
            "meminfo": f"MemTotal: 2048 kB\nMemFree: 0 kB\nMemAvailable: {available} kB\n",
            "vmstat": f"workingset_refault_file {refaults}\npswpout 0\n",
            "pressure/memory": f"some avg10=0.0 avg60=0.0 avg300=0.0 total={stall}\n",
        }.items():
            path = tmp_path / "proc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    clock = iter([10.0, 10.5, 11.5])
    write(1024, 5, 100)
    sampler = Sampler(tmp_path, lambda: next(clock))
    first = sampler.sample(1, 2)
    assert (first.refault_bytes, first.stall_seconds) == (0, 0.0)
    assert (first.pinned_bytes, first.dense_unlocked_bytes, first.available_bytes) == (1, 2, 1 << 20)
    write(512, 9, 250_100)
    second = sampler.sample(0, 0)
    assert (second.seconds, second.available_bytes, second.limit_bytes) == (0.5, 1 << 19, 2 << 20)
    assert second.refault_bytes == 4 * 4096
    assert second.stall_seconds == 0.25
    write(512, 9, 900_100)
    third = sampler.sample(0, 0)
    assert third.refault_bytes == 0
    assert third.stall_seconds == 0.0, "others stall at limits of their own"
