"""The benchmark of the tap runs, and its arms are what they say."""

from __future__ import annotations

import json
import subprocess
import sys


def test_it_measures_every_arm() -> None:
    command = [sys.executable, "-m", "expertd.bench.tap_cost", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"no tap", "wants nothing", "wants nothing, without filter", "looks at all"}
    assert all(0 < arm["low"] <= arm["median"] <= arm["high"] for arm in found.values())
