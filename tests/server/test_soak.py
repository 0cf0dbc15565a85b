"""A small soak in CI; the long one is `python -m tests.server.soak --requests 2000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.soak import soak


@pytest.mark.slow
def test_nothing_grows_and_nothing_is_left(demo_model: Path) -> None:
    found = soak(demo_model, 240, seed=3)
    before, *_, after = found["footprints"]
    assert not any(status.startswith("5") and status != "503" for status in found["ends"]), found
    assert found["log_errors"] == []
    assert found["ends"]["dropped"] > 20
    assert found["in_flight"] == found["queued"] == 0
    assert found["expert_requests"] == found["expert_requests_by_layer"] > 0
    assert after["descriptors"] <= before["descriptors"] + 2, found
    assert after["threads"] <= before["threads"], found
    assert after["anonymous_kib"] <= before["anonymous_kib"] + 16_384, found
