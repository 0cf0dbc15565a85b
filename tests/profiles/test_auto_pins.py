"""What is pinned by itself: only a stable hot core, never above its limit, given up without fluttering."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.runtime.pinning import AutoPins, RouteWindow
from expertd.types import ExpertLayout, Phase
from tests.profiles.test_selection import layout_of

LAYOUT: ExpertLayout = layout_of((0, 1, 2, 3), 64)
NBYTES = 1000
ALL = 1 << 40


def _window(rng: random.Random, hot: dict[int, float], tokens: int = 256) -> list[int]:
    """Routes in which each layer's experts in `hot` come with their chance; the rest is even."""
    window = RouteWindow(LAYOUT)
    for _ in range(tokens):
        for layer in range(4):
            picked = [i for i, p in hot.items() if rng.random() < p][:2]
            while len(picked) < 2:
                other = rng.randrange(64)
                if other not in picked and other not in hot:
                    picked.append(other)
            window.observe(layer, picked, Phase.DECODE)
    return window.take()


def test_a_window_counts_and_starts_afresh() -> None:
    window = RouteWindow(LAYOUT)
    window.observe(0, [1, 2], Phase.DECODE)
    window.observe(1, [3, 4], Phase.DECODE)
    window.observe(0, [1, 2] * 16, Phase.PREFILL)
    assert window.tokens == 17
    counts = window.take()
    assert (counts[1], counts[64 + 3]) == (17, 1)
    assert window.tokens == 0
    assert sum(window.take()) == 0


def test_a_stable_hot_core_is_pinned_and_nothing_else() -> None:
    rng, pins = random.Random(1), AutoPins(LAYOUT)
    assert pins.step(_window(rng, {3: 0.6, 9: 0.5}), ALL, ALL).pin == ()
    got = pins.step(_window(rng, {3: 0.6, 9: 0.5}), ALL, ALL)
    assert set(got.pin) == {layer * 64 + i for layer in range(4) for i in (3, 9)}
    assert "take" in got.why
    again = pins.step(_window(rng, {3: 0.6, 9: 0.5}), ALL, ALL)
    assert (again.pin, again.unpin) == ((), ())


def test_even_routing_pins_nothing_and_says_why() -> None:
    rng, pins = random.Random(2), AutoPins(LAYOUT)
    for _ in range(5):
        assert pins.step(_window(rng, {}), ALL, ALL).pin == ()
    assert "too even" in pins.why


def test_what_is_hot_in_one_window_alone_is_not_pinned() -> None:
    rng, pins = random.Random(3), AutoPins(LAYOUT)
    for turn in range(6):
        assert pins.step(_window(rng, {turn * 5: 0.7}), ALL, ALL).pin == ()


def test_a_core_that_cools_a_little_stays_and_one_that_is_over_goes() -> None:
    rng, pins = random.Random(4), AutoPins(LAYOUT)
    for _ in range(2):
        pins.step(_window(rng, {3: 0.6, 9: 0.5}), ALL, ALL)
    assert len(pins.held) == 8
    flutter = [pins.step(_window(rng, {3: 0.6, 9: p}), ALL, ALL) for p in (0.1, 0.14, 0.1, 0.13)]
    assert all(not f.pin for f in flutter)
    for _ in range(2):
        gone = pins.step(_window(rng, {3: 0.6}), ALL, ALL)
    assert {e % 64 for e in pins.held} == {3}
    assert {e % 64 for e in gone.unpin} <= {9}


def test_pins_that_were_taken_back_are_not_asked_for_at_once() -> None:
    rng, pins = random.Random(5), AutoPins(LAYOUT)
    for _ in range(2):
        got = pins.step(_window(rng, {3: 0.6}), ALL, ALL)
    pins.taken_back(got.pin)
    asked = [bool(pins.step(_window(rng, {3: 0.6}), ALL, ALL).pin) for _ in range(7)]
    assert not any(asked[:4])
    assert any(asked)


def test_layers_that_were_hardly_seen_keep_what_they_have() -> None:
    rng, pins = random.Random(6), AutoPins(LAYOUT)
    for _ in range(2):
        pins.step(_window(rng, {3: 0.6}), ALL, ALL)
    counts = _window(rng, {3: 0.6})
    counts[:64] = [0] * 64
    assert pins.step(counts, ALL, ALL).unpin == ()
    assert 3 in pins.held


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20 * NBYTES), st.integers(0, 40 * NBYTES), st.integers(0, 1000))
def test_never_above_the_limit_nor_half_the_budget(limit: int, budget: int, seed: int) -> None:
    rng, pins = random.Random(seed), AutoPins(LAYOUT)
    for _ in range(3):
        hot = {rng.randrange(64): rng.random() for _ in range(4)}
        pins.step(_window(rng, hot, tokens=64), budget, limit)
        assert len(pins.held) * NBYTES <= min(limit, budget // 2)
