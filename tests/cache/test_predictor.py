"""The next layer's experts, guessed from this layer's."""

from __future__ import annotations

import random
from pathlib import Path

from expertd.cache.predictor import Predictor
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase


def test_what_always_follows_is_guessed() -> None:
    predictor = Predictor(3, 16, most=2)
    rng = random.Random(1)
    guesses = []
    for _ in range(200):
        first = rng.randrange(16)
        for layer in range(3):
            predictor.observe(layer, [(first + 3 * layer) % 16, (first + 3 * layer + 5) % 16])
            if layer < 2:
                guesses.append(predictor.propose(layer, layer + 1))
    assert predictor.active
    assert predictor.precision > 0.85
    assert all(16 <= e < 48 for guess in guesses for e in guess)
    assert guesses[0] == []


def test_chance_switches_it_off_and_a_pattern_on_again() -> None:
    predictor = Predictor(2, 32, most=2)
    rng = random.Random(2)

    def feed(n: int, follows: bool) -> None:
        for _ in range(n):
            first = rng.sample(range(32), 2)
            predictor.observe(0, first)
            predictor.propose(0, 1)
            predictor.observe(1, [31 - i for i in first] if follows else rng.sample(range(32), 2))

    feed(300, follows=True)
    assert predictor.active
    feed(1500, follows=False)
    assert not predictor.active
    predictor.observe(0, [1, 2])
    assert predictor.propose(0, 1) == []
    feed(3000, follows=True)
    assert predictor.active


def test_a_guess_is_scored_only_against_the_layer_it_was_for() -> None:
    predictor = Predictor(3, 8, most=2)
    for _ in range(3):
        predictor.observe(0, [1])
        predictor.propose(0, 1)
        predictor.observe(2, [1])
    assert predictor.guessed == 0
    assert predictor.recall == 0.0


def test_counts_too_large_to_keep_are_not_kept() -> None:
    predictor = Predictor(64, 1024, most=8)
    predictor.observe(0, [1, 2])
    assert predictor.propose(0, 1) == []


def test_recall_on_a_recorded_trace_is_far_above_chance() -> None:
    trace = load_trace(Path(__file__).with_name("data") / "code.trace")
    predictor = Predictor(trace.n_layers, trace.n_experts, most=2 * trace.k)
    for r in trace.routes:
        if r.phase == Phase.DECODE:
            predictor.observe(r.layer, r.ids)
            if r.layer + 1 < trace.n_layers:
                predictor.propose(r.layer, r.layer + 1)
    chance = 2 * trace.k / trace.n_experts
    assert predictor.recall > 3 * chance
