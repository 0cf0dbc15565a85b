"""The budget in a real memory cgroup: it finds the edge, makes room when another takes memory, and comes back (M5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expertd.types import ExpertLayout

pytestmark = [pytest.mark.root, pytest.mark.cgroup]

MIB = 1 << 20
LIMIT = 160 * MIB


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A fresh memory cgroup of LIMIT bytes."""
    v1 = Path("/sys/fs/cgroup/memory")
    parent = v1 if (v1 / "memory.limit_in_bytes").exists() else Path("/sys/fs/cgroup")
    path = parent / f"expertd-pressure-{os.getpid()}"
    path.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (path / name).exists():
                (path / name).write_text(str(LIMIT))
        yield path
    finally:
        path.rmdir()


_DECODE = """
import json, mmap, os, random, subprocess, sys, time
from pathlib import Path
from expertd.pages import libc, memory
from expertd.pages.budget import BudgetController, Sampler
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.worker import PagerWorker
from expertd.types import ExpertLayout, ExpertTensor, Extent, MoeLayer

cgroup, path, stride, count = Path(sys.argv[1]), Path(sys.argv[2]), 700_032, 100
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
layer = MoeLayer(0, count, tuple(ExpertTensor(r, r, 0, 4128 + i * stride * count, stride) for i, r in enumerate("gud")))
layout = ExpertLayout((path,), (path.stat().st_size,), 1, count, 4, (layer,), (Extent(0, 0, 4128),))
size = layer.expert_nbytes
mapping = MappedFiles.map([path])
pager = Pager(layout, mapping)
pager.drop_files()
pager.calibrate()
worker = PagerWorker(pager)
worker.start()
controller = BudgetController(8 * size, count * size, 4 * size)
sampler = Sampler()
resident, picks = {}, random.Random(1)
def decode(seconds):
    fetched, taken = pager.counters.fetch_bytes, memory.reclaim().refault_bytes
    end = time.monotonic() + seconds
    looked = 0.0
    while time.monotonic() < end:
        if time.monotonic() - looked > 0.1:
            controller.step(sampler.sample(0, 0))
            looked = time.monotonic()
        for _ in range(4):
            wanted = sorted(picks.sample(range(count), 4))
            fetch = [e for e in wanted if e not in resident]
            if fetch:
                pager.fetch(fetch)
            pager.wait(wanted)
            for e in wanted:
                resident.pop(e, None)
                resident[e] = 1
            gone = []
            while len(resident) * size > controller.budget_bytes:
                gone.append(next(iter(resident)))
                del resident[gone[-1]]
            if gone:
                worker.evict(gone)
    return {"budget": controller.budget_bytes, "held": len(resident) * size,
            "refaulted": (memory.reclaim().refault_bytes - taken) / (pager.counters.fetch_bytes - fetched)}
taker = "b = bytearray(60 << 20)\\nprint(1, flush=True)\\ninput()"
report = {"alone": decode(1.5)}
report["alone again"] = decode(1.0)
child = subprocess.Popen([sys.executable, "-c", taker], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
decode(1.0)
report["pressed"] = decode(0.5)
report["pressed again"] = decode(1.0)
child.communicate(b"\\n")
decode(4.0)
report["after"] = decode(0.5)
report["killed"] = child.returncode
worker.stop()
print(json.dumps(report))
"""


def test_the_budget_follows_the_memory_there_is(
    cgroup: Path, scratch: Path, make_model: Callable[..., ExpertLayout]
) -> None:
    layout = make_model(scratch / "pressed", stride=700_032, n_experts=100, n_layers=1, header=4_128)
    done = subprocess.run(
        [sys.executable, "-c", _DECODE, str(cgroup), str(layout.files[0])],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(report)
    alone, again, pressed, settled, after = (
        report[k] for k in ("alone", "alone again", "pressed", "pressed again", "after")
    )
    # The largest budget that the kernel hardly has to touch.
    assert again["budget"] > 0.75 * LIMIT
    assert again["held"] > 0.95 * again["budget"]
    assert again["refaulted"] < 0.02
    # Another process took 60 MiB: they were made, nobody was killed, and it is quiet again.
    assert pressed["budget"] < alone["budget"] - 50 * MIB
    assert pressed["held"] <= pressed["budget"]
    assert settled["refaulted"] < 0.02
    assert report["killed"] == 0
    # It went: its memory is taken back.
    assert after["budget"] > 0.85 * alone["budget"]


_FORGET = """
import json, os, sys
from pathlib import Path
from expertd.pages import memory
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.types import ExpertLayout, ExpertTensor, Extent, MoeLayer

cgroup, path, stride, count = Path(sys.argv[1]), Path(sys.argv[2]), 700_032, 100
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
layer = MoeLayer(0, count, tuple(ExpertTensor(r, r, 0, 4128 + i * stride * count, stride) for i, r in enumerate("gud")))
layout = ExpertLayout((path,), (path.stat().st_size,), 1, count, 4, (layer,), (Extent(0, 0, 4128),))
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
for at in range(0, layout.file_nbytes[0], 1 << 20):
    os.pread(fd, 1 << 20, at)
with MappedFiles.map([path]) as mapping:
    pager = Pager(layout, mapping)
    if sys.argv[3] == "calibrated":
        pager.calibrate()
    before = memory.reclaim().refault_bytes
    pager.fetch(list(range(8)))
    pager.wait(list(range(8)))
    print(json.dumps([memory.reclaim().refault_bytes - before, 8 * layer.expert_nbytes]))
"""


@pytest.mark.linux65
def test_what_a_former_reader_lost_is_not_taken_for_pressure(
    cgroup: Path, scratch: Path, make_model: Callable[..., ExpertLayout]
) -> None:
    """The kernel remembers which pages it took, whoever had read them."""
    layout = make_model(scratch / "pressed", stride=700_032, n_experts=100, n_layers=1, header=4_128)

    def refaults(how: str) -> float:
        command = [sys.executable, "-c", _FORGET, str(cgroup), str(layout.files[0]), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        refaulted, read = json.loads(done.stdout)
        return float(refaulted / read)

    # Reclaim goes on in the background while the few experts are read, and may take some of them.
    as_it_was, calibrated = refaults("as it was"), refaults("calibrated")
    assert as_it_was > 0.1
    assert calibrated < as_it_was / 3
