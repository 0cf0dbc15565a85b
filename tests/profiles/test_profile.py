"""What a profile counts and what can be read off it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.errors import RequestError, StateError
from expertd.runtime import profile as hot
from expertd.runtime.profile import Profile, Shape, check_name
from tests.profiles.conftest import SHAPE, taught

NAMES = ("default", "a", "A.b-c_9", "x" * 64)
NO_NAMES = (
    "",
    ".",
    "..",
    ".hidden",
    "-dash",
    "a/b",
    "../etc/passwd",
    "a b",
    "a\n",
    "a\0b",
    "ä",
    "x" * 65,
    "a/",
    "~root",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_never_becomes_a_path(name: str) -> None:
    with pytest.raises(RequestError, match="no profile's name"):
        check_name(name)


def test_the_chance_of_an_expert_is_its_share_of_the_layers_requests() -> None:
    profile = Profile.empty("p", SHAPE)
    for _ in range(30):
        profile.add(1, (3, 5), 2)
    for _ in range(10):
        profile.add(1, (3, 7), 2)
    chances = profile.chances()
    assert chances[16 + 3] == pytest.approx(1.0)
    assert chances[16 + 5] == pytest.approx(0.75, abs=0.01)
    assert chances[16 + 7] == pytest.approx(0.25, abs=0.01)
    assert sum(chances) == pytest.approx(2.0)
    assert profile.hottest() == [19, 21, 23]


def test_layers_seen_rarely_weigh_as_much_as_the_others() -> None:
    profile = Profile.empty("p", SHAPE)
    for token in range(320):
        profile.add(0, (1, 2), 2)
        if token % 16 == 0:
            profile.add(1, (1, 2), 2)
    chances = profile.chances()
    assert chances[16 + 1] == pytest.approx(chances[1])


def test_what_was_learnt_is_forgotten_by_half_in_a_half_life() -> None:
    profile = Profile.empty("p", SHAPE)
    profile.half_life = 256.0
    for _ in range(256):
        profile.add(0, (0, 1), 2)
    first = profile.counts[0]
    for _ in range(256):
        profile.add(0, (2, 3), 2)
    assert profile.counts[0] == pytest.approx(first / 2, rel=0.01)
    for _ in range(5000):
        profile.add(0, (2, 3), 2)
    assert profile.chances()[0] < 0.001


def test_a_prompt_counts_each_of_its_tokens() -> None:
    one, many = Profile.empty("a", SHAPE), Profile.empty("b", SHAPE)
    for _ in range(8):
        one.add(0, (4, 6), 2)
    many.add(0, (4, 6) * 8, 16)
    assert one.counts == many.counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15), st.integers(0, 15)), max_size=200))
def test_counts_are_never_negative_and_shares_add_up(routes: list[tuple[int, int, int]]) -> None:
    profile = Profile.empty("p", SHAPE)
    for layer, a, b in routes:
        profile.add(layer, (a, b), 2)
    chances = profile.chances()
    assert min(profile.counts) >= 0.0
    assert all(0.0 <= c <= 1.0 for c in chances)
    assert {e // 16 for e in profile.hottest()} == {layer for layer, _, _ in routes}
    assert profile.blank == (not routes)


def test_a_copy_is_not_taught_with_its_original() -> None:
    profile = taught()
    copy = profile.copy("other")
    profile.add(0, (1, 2), 2)
    assert copy.name == "other"
    assert copy.counts != profile.counts


def test_merged_profiles_know_what_each_knew() -> None:
    a, b = taught("a", hot=0), taught("b", hot=8)
    both = hot.merge("both", [a, b])
    assert both.tokens == 400
    assert both.counts == [x + y for x, y in zip(a.counts, b.counts, strict=True)]
    sizes = [1] * len(both.counts)
    hottest = both.hottest()
    for one, other in ((a, b), (b, a)):
        own = hot.held_share(one, one.hottest(), sizes, 32)
        assert own > hot.held_share(one, hottest, sizes, 32) > hot.held_share(one, other.hottest(), sizes, 32)


def test_profiles_of_different_models_are_not_merged() -> None:
    other = Shape("f" * 32, "b", 4, 16, 2)
    with pytest.raises(StateError, match="different models"):
        hot.merge("x", [taught("a"), taught("b", shape=other)])


def test_concentration_tells_even_from_skewed() -> None:
    even = Profile("even", SHAPE, [1.0] * 64)
    found = hot.concentration(even.chances(), 64)
    assert found.top25 == pytest.approx(0.25)
    assert hot.concentration(taught().chances(), 64).top25 > 0.6
    assert hot.concentration([0.0] * 64, 64).top50 == 0.0


def test_overlap_of_hot_experts() -> None:
    a, b = taught("a", hot=0), taught("b", hot=8)
    assert hot.overlap(a, a, 0.25) == 1.0
    assert hot.overlap(a, b, 0.25) < 0.3
    assert hot.overlap(Profile.empty("n", SHAPE), a, 0.25) == 0.0
