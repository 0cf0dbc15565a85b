"""The forecast of the decode's speed: ranges, their parts and what was measured."""

from __future__ import annotations

import pytest

from expertd.model.expertmap import ExpertMap
from expertd.model.forecast import Rates, TokenReads, forecast, skewed_hit_ratio
from expertd.model.plan import Machine, Wish, make_plan

GB = 10**9
GIB = 1 << 30


def test_hits_lie_between_no_skew_and_the_recorded_trace() -> None:
    assert skewed_hit_ratio(0.10) == pytest.approx(0.55)
    assert skewed_hit_ratio(0.125) == pytest.approx(0.61)
    assert skewed_hit_ratio(2.0) == 1.0
    assert skewed_hit_ratio(-1.0) == 0.0


def test_the_range_holds_what_was_measured() -> None:
    """16.9 GB at 5 GB, 2 cores, a disk of 1.7 GB/s: 3.1 to 4.6 tokens a second were measured."""
    experts, dense = 16.3e9, 0.9e9
    reads = TokenReads(int(dense), int(experts * 6 / 128), 0, held=(5e9 - 1.3e9) / experts, layers=48)
    found = forecast(reads, Rates(disk=(1.4 * GB, 1.7 * GB), physical_cores=2))
    low, high = found.tokens_per_second
    assert low < 3.1
    assert high > 4.6
    assert found.missed_bytes_per_token[0] > found.missed_bytes_per_token[1]


def test_the_parts_of_a_token_add_up() -> None:
    reads = TokenReads(dense_ram=1 * GB, experts_ram=1 * GB, vram=0, held=0.5, layers=0)
    found = forecast(reads, Rates(ram=(10 * GB, 10 * GB), disk=(1 * GB, 1 * GB)))
    # 2 GB at 10 GB/s and half a GB, or a twentieth, at 1 GB/s
    assert found.tokens_per_second[0] == pytest.approx(1 / (0.2 + 0.5))
    assert found.tokens_per_second[1] == pytest.approx(1 / (0.2 + 0.05))
    assert found.hit_ratio == (0.5, 0.95)
    assert any("as given" in a for a in found.assumptions)
    assert any("probed" in a for a in found.assumptions)


def test_all_held_reads_no_disk(big: ExpertMap) -> None:
    plan = make_plan(big, Machine(ram_nbytes=80 * GIB, physical_cores=8), Wish())
    assert plan.forecast.missed_bytes_per_token == (0, 0)
    assert not any("disk" in a for a in plan.forecast.assumptions)
