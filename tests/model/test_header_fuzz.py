"""Damaged and malicious headers give an error of ours or a map: no traceback, no hang, no memory without bounds.

`fuzz_header.py` beside this file runs the same by the million.
"""

from __future__ import annotations

import random
import resource

import pytest
from fuzz_header import digest, mutate, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = seeds()


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_the_seeds_are_sound(seed: int) -> None:
    head, data = SEEDS[seed]
    assert digest(head, len(head) + data, deep=True).startswith("map")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SEEDS) - 1), st.randoms(use_true_random=False))
def test_a_mutated_header(seed: int, numbers: random.Random) -> None:
    head, data = SEEDS[seed]
    digest(mutate(head, numbers), len(head) + data, deep=True)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 1 << 62))
def test_any_bytes_behind_the_magic(tail: bytes, more: int) -> None:
    digest(b"GGUF\x03\0\0\0" + tail, 8 + len(tail) + more, deep=True)


def test_some_thousands_in_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers = random.Random(7)
    outcomes = set()
    for i in range(6000):
        head, data = numbers.choice(SEEDS)
        outcomes.add(digest(mutate(head, numbers), len(head) + data, deep=i % 20 == 0))
    assert {"map", "ModelFormatError", "map and plan"} <= outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
