"""The benchmark of the first answer after a restart: what it makes of its rows. That it runs is for a quiet machine."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from expertd.bench import warmstart


def _row(arm: str, first: float, again: list[float]) -> dict[str, Any]:
    def figures(speed: float) -> dict[str, float]:
        return {"ttft_seconds": 1 / speed, "tokens_per_second": speed, "hit_ratio": 0.5}

    return {
        "arm": arm, "before_seconds": 1.0, "ready_seconds": 2.0, "first": figures(first),
        "again": [figures(a) for a in again], "warm": {"bytes_per_second": 5},
    }  # fmt: skip


def test_medians_and_shares_of_steady() -> None:
    rows = [_row("profile", 9.0, [10.0, 10.0, 90.0]), _row("none", 4.0, [8.0])]
    speeds = [{"warm": 95.0, "cached": 40.0, "direct": 100.0}, {"warm": 99.0, "cached": 41.0, "direct": 100.0}]
    found = warmstart._summary(rows, speeds)
    assert found["profile"]["first_share"]["tokens_per_second"] == pytest.approx(0.9)
    assert found["profile"]["first_share"]["ttft_seconds"] == pytest.approx(0.9)
    assert found["profile"]["warm_bytes_per_second"] == 5
    assert found["none"]["ready_seconds"] == 3.0
    assert found["warm_share_of_sequential"] == pytest.approx(0.97), "of the faster way to read"


def test_an_arm_that_there_is_not_is_said() -> None:
    done = CliRunner().invoke(warmstart.main, ["--arms", "none,magic"])
    assert done.exit_code == 2
    assert "magic" in done.output
