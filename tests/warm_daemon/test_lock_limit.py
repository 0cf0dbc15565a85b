"""M1: a limit of 8 MiB on locked memory and a pin budget of 64 MiB, without the capability that lifts the limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import asyncio, json, logging, resource, sys
from pathlib import Path
from expertd.engine import openmp
openmp.load(1)
from expertd.daemon.facts import snapshot
from expertd.engine.settings import EngineSettings
from expertd.pages.locks import locked_by_kernel
from expertd.runtime.selection import Selection
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
async def main():
    engine = EngineSettings(Path(sys.argv[1]), n_ctx=256, n_ubatch=32, threads=1, threads_batch=1)
    service = Service(RuntimeSettings(engine, steering="on", budget_share=1.0, pin_budget=64 << 20))
    service.start()
    while service.state not in ("ready", "failed"):
        await service.wait_changed()
    answers = [service.actions.pin(Selection()) for _ in range(2)]
    service.steering.pager.pin(list(range(service.steering.layout.n_experts)))
    print(json.dumps({
        "state": service.state, "answers": answers, "locked": locked_by_kernel(),
        "counted": service.steering.pager.locks.locked_bytes, "pinned": service.cache_report()["pinned_bytes"],
        "failures": snapshot(service, {}).pager.pin_failures,
    }))
    await service.stop()
asyncio.run(main())
"""


@pytest.mark.root
def test_it_starts_pins_what_the_limit_allows_and_says_so_once(model: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", sys.executable, "-c", CHILD, str(model)],
        capture_output=True, text=True, timeout=120, check=False, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "ready"
    assert 7 << 20 < found["locked"] <= 8 << 20
    assert found["counted"] == found["locked"]
    assert found["pinned"] == found["answers"][0]["pinned"]["bytes"] > 0
    assert any("limit on locked memory is 8.0 MiB" in s["why"] for s in found["answers"][0]["skipped"])
    assert found["failures"]["limit"] > 0
    assert found["failures"]["memory"] == found["failures"]["other"] == 0
    assert done.stderr.count("the limit on locked memory is 8.0 MiB") == 1
