from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.bench.results import METRICS, ArmResult, compare, percentile, summarise, to_json
from expertd.bench.spec import Arm, Cache, Kind, Run
from expertd.errors import UsageError

Make = Callable[..., Run]


def _arm(kind: Kind, runs: Sequence[Run]) -> ArmResult:
    return summarise(Arm(str(kind), kind), runs)


def test_medians_and_spread(make_run: Make) -> None:
    result = _arm(Kind.PLAIN, [make_run(gap=g) for g in (0.5, 0.25, 1.0)])
    assert result.values["tokens_per_second"] == 2.0
    assert result.spread["tokens_per_second"] == (1.0, 4.0)
    assert result.values["ttft_seconds"] == 2.0
    assert result.values["start_to_first_token_seconds"] == 3.0
    assert result.values["major_faults_per_token"] == 2.0
    assert result.values["prompt_tokens_per_second"] == 5.0
    assert result.values["hit_ratio"] is None
    assert "hit_ratio" not in result.spread
    assert not result.bound


def test_a_run_that_was_ended_counts_with_its_upper_bound(make_run: Make) -> None:
    # Two gaps of 0.5 s, then 9 s without a token: at most 3 tokens in 10 s.
    late = _arm(Kind.PLAIN, [make_run(gap=0.5, stalled=9.0, finished=False)])
    assert late.bound
    assert late.values["tokens_per_second"] == pytest.approx(0.3)
    steered = _arm(Kind.STEERED, [make_run("steered", gap=0.1)])
    comparison = compare([late, steered])
    assert to_json(comparison)["decode_ratio_is"] == "at least"
    assert to_json(comparison)["decode_ratio"] == pytest.approx(10 / 0.3)
    assert to_json(compare([steered, late]))["decode_ratio_is"] == "at most"
    both = to_json(compare([late, _arm(Kind.STEERED, [make_run("steered", finished=False)])]))
    assert (both["decode_ratio_is"], both["decode_ratio"]) == ("unknown", None), "two upper bounds have no ratio"


def test_a_run_without_a_first_token(make_run: Make) -> None:
    run = make_run(output=(), finished=False, stalled=20.0)
    assert METRICS["tokens_per_second"](run) == pytest.approx(1 / 20)
    assert METRICS["read_bytes_per_token"](run) is None


def test_ratios_and_the_contract(make_run: Make) -> None:
    cache = Cache(requests=100, hits=80, tap_seconds=0.004, splits=16, budget_bytes=10, policy="lru")
    plain = _arm(Kind.PLAIN, [make_run(gap=0.5, read=2000)])
    steered = _arm(Kind.STEERED, [make_run("steered", gap=0.1, read=200, cache=cache)])
    document = to_json(compare([plain, steered]))
    assert document["decode_ratio"] == pytest.approx(5)
    assert document["ttft_ratio"] == 1
    assert document["read_ratio"] == pytest.approx(0.1)
    assert document["same_output"] is True
    for arm in document["arms"]:
        assert {
            "name", "tokens_per_second", "ttft_seconds", "load_seconds", "read_bytes_per_token",
            "major_faults_per_token", "hit_ratio", "cpu_seconds_per_token", "spread", "runs",
        } <= set(arm)  # fmt: skip
    assert document["arms"][1]["hit_ratio"] == 0.8
    assert document["arms"][1]["splits_per_token"] == 8
    assert document["arms"][1]["policy"] == "lru"
    msgspec.json.encode(document)


def test_outputs_are_compared_token_by_token(make_run: Make) -> None:
    plain = _arm(Kind.PLAIN, [make_run(output=(1, 2, 3, 4)), make_run(output=(1, 2), finished=False)])
    same = _arm(Kind.STEERED, [make_run("steered", output=(1, 2, 3, 4))])
    assert compare([plain, same]).same_output, "of a run that was ended, as far as it came"
    other = _arm(Kind.STEERED, [make_run("steered", output=(1, 2, 9, 4))])
    difference = compare([plain, other]).difference
    assert difference is not None
    assert (difference.arm, difference.run, difference.prompt, difference.token) == ("steered", 0, 0, 2)


def test_logits_are_compared_to_the_last_bit(make_run: Make) -> None:
    plain = _arm(Kind.PLAIN, [make_run(logits="a")])
    assert compare([plain, _arm(Kind.STEERED, [make_run("steered", logits="a")])]).same_logits
    assert not compare([plain, _arm(Kind.STEERED, [make_run("steered", logits="b")])]).same_logits


def test_repacked_weights_are_compared_among_themselves(make_run: Make) -> None:
    plain = _arm(Kind.PLAIN, [make_run(output=(1, 2))])
    repacked = _arm(Kind.REPACKED, [make_run("repacked", output=(1, 9), repacked=True, logits="r")])
    auto = _arm(Kind.AUTO, [make_run("auto", output=(1, 9), repacked=True, logits="r")])
    comparison = compare([plain, repacked, auto])
    assert comparison.same_output
    assert comparison.same_logits
    wrong = _arm(Kind.AUTO, [make_run("auto", output=(1, 8), repacked=True)])
    assert not compare([plain, repacked, wrong]).same_output


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("plain", Arm("plain", Kind.PLAIN)),
        ("steered@2GiB", Arm("steered@2GiB", Kind.STEERED, 2 << 30)),
        ("steered@1780MB/lru", Arm("steered@1780MB/lru", Kind.STEERED, 1_780_000_000, "lru")),
        ("auto/lru", Arm("auto/lru", Kind.AUTO, 0, "lru")),
    ],
)
def test_arms_by_name(text: str, arm: Arm) -> None:
    assert Arm.parse(text) == arm


@pytest.mark.parametrize("text", ["fast", "plain@2GiB", "steered@much", "", "plain/lru"])
def test_arms_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        Arm.parse(text)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_nearest_ranks(values: list[float], share: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(v <= found for v in ordered) >= len(ordered) * share / 100
    assert sum(v < found for v in ordered) < len(ordered) * share / 100
