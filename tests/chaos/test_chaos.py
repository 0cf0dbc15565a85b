"""A small chaos in CI; the long one is `python -m tests.chaos.chaos --kills 50`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chaos import run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_serves_after_kills_a_full_disk_unfinished_requests_and_a_siege(tmp_path: Path) -> None:
    chaos = run(tmp_path, n_kills=3, seed=1, n_connections=60, only={"kills", "disk", "clients"}, small=True)
    assert chaos.violations == []
    assert set(chaos.skipped) <= {"full disk"}
    assert "3 kills" in chaos.summary[0]
