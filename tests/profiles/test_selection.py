"""Which experts a person means."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.errors import RequestError
from expertd.runtime.selection import choose, parse
from expertd.types import ExpertLayout, ExpertTensor, MoeLayer


def layout_of(layers: tuple[int, ...] = (1, 2, 4), n_experts: int = 8) -> ExpertLayout:
    """Dense layers 0 and 3; layer 4 has half as many experts."""
    made = tuple(
        MoeLayer(n, n_experts if n != 4 else n_experts // 2, (ExpertTensor("down", f"blk.{n}", 0, n * 8000, 1000),))
        for n in layers
    )
    return ExpertLayout((Path("m"),), (100_000,), 5, n_experts, 2, made, ())


LAYOUT = layout_of()
HEAT = [float((e * 7) % 13) for e in range(40)]


def _chosen(**wish: object) -> list[int]:
    return choose(parse(LAYOUT, **wish), LAYOUT, HEAT)  # type: ignore[arg-type]


def test_nothing_said_is_every_expert_there_is_hottest_first() -> None:
    found = _chosen()
    assert len(found) == 20
    assert found == sorted(found, key=lambda e: (-HEAT[e], e))
    assert parse(LAYOUT).everything


def test_layers_and_ranges() -> None:
    assert {e // 8 for e in _chosen(layers="0-2,4")} == {1, 2, 4}
    assert {e // 8 for e in _chosen(layers=" 2 ")} == {2}
    assert {e // 8 for e in _chosen(layers="2-99")} == {2, 4}


def test_a_share_is_of_the_hottest() -> None:
    assert _chosen(share="25%") == _chosen()[:5]
    assert _chosen(share=0.25, layers="1") == _chosen(layers="1")[:2]
    assert len(_chosen(share="0.1%")) == 1


def test_single_experts() -> None:
    assert set(_chosen(experts=["1:3", "4:0-2", "1:3"])) == {11, 32, 33, 34}


def test_a_profile_leaves_out_what_it_never_saw() -> None:
    assert all(HEAT[e] > 0 for e in _chosen(profile="p"))
    assert len(_chosen(profile="p")) < len(_chosen())


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"layers": "x"}, "no layer"),
        ({"layers": "3-1"}, "no layer"),
        ({"layers": "0,3"}, "has experts"),
        ({"layers": "-1"}, "no layer"),
        ({"layers": "1,,2"}, "no layer"),
        ({"layers": "9" * 30}, "no layer"),
        ({"share": "0%"}, "no share"),
        ({"share": 1.5}, "no share"),
        ({"share": "nan"}, "no share"),
        ({"share": "much"}, "no share"),
        ({"experts": ["1"]}, "no expert"),
        ({"experts": ["1:9"]}, "there is no expert"),
        ({"experts": ["4:4"]}, "there is no expert"),
        ({"experts": ["3:0"]}, "there is no expert"),
        ({"experts": ["1:5-2"]}, "there is no expert"),
        ({"experts": ["1:1"], "share": 0.5}, "go with no other"),
    ],
)
def test_what_cannot_be_meant_is_said(wish: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        _chosen(**wish)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
def test_any_text_is_a_choice_or_one_line(layers: str, share: str, expert: str) -> None:
    for wish in ({"layers": layers}, {"share": share}, {"experts": [expert]}):
        said = ""
        try:
            assert set(_chosen(**wish)) <= set(_chosen())
        except RequestError as error:
            said = error.message
        assert "\n" not in said
