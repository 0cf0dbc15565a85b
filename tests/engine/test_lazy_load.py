"""Loading without reading: from a cold page cache hardly anything is read, and the table is as it was afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from expertd.engine import abi
from expertd.engine.lazy_load import _relocation_slots, lazy_load
from expertd.engine.model import start_backend

_LOAD = """
import json, os, sys
from pathlib import Path
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.settings import EngineSettings
from expertd.pages import residency
from expertd.pages.mapping import MappedFiles
from expertd.model.gguf import read_model
from expertd.types import Extent
from expertd.model.expertmap import build_map

def anon():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024

def read():
    return next(int(l.split()[1]) for l in open("/proc/self/io") if l.startswith("read_bytes"))

path = Path(sys.argv[1])
layout = build_map(read_model(path)).layout()
start_backend()
fd = os.open(path, os.O_RDONLY)
os.fsync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
a0, r0 = anon(), read()
model = LoadedModel(EngineSettings(path, lazy_load=sys.argv[2] == "lazy"))
a1, r1 = anon(), read()
mapping = MappedFiles.adopt(layout.files)
experts = [Extent(t.file, t.offset, t.stride * m.n_experts) for m in layout.layers for t in m.tensors]
print(json.dumps({"anon": a1 - a0, "read": r1 - r0, "resident": residency.resident_bytes(mapping, experts),
                  "experts": layout.expert_nbytes, "file": path.stat().st_size, "active": model.lazy.active,
                  "mappings": model.lazy.mappings, "notes": model.notes}))
"""


def _load(model: Path, how: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(model), how], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.linux65
def test_a_cold_load_reads_hardly_anything_and_repacks_nothing(big_model: Path) -> None:
    found = _load(big_model, "lazy")
    assert found["active"]
    assert found["mappings"] == 1
    assert found["notes"] == []
    assert found["resident"] < 0.05 * found["experts"]
    assert found["read"] < 0.10 * found["file"]
    assert found["anon"] < 0.5 * found["experts"]


@pytest.mark.linux65
def test_a_stock_load_reads_the_file_which_is_what_the_patch_avoids(big_model: Path) -> None:
    found = _load(big_model, "stock")
    assert not found["active"]
    assert found["resident"] > 0.9 * found["experts"]
    assert any("switched off" in str(note) for note in found["notes"]) or found["notes"] == []


def test_the_relocation_table_is_put_back() -> None:
    start_backend()
    library = abi.library("llama")

    def table() -> dict[str, list[int]]:
        import ctypes

        slots = _relocation_slots(library)
        return {name: [ctypes.c_void_p.from_address(s).value or 0 for s in where] for name, where in slots.items()}

    before = table()
    with lazy_load(library) as state:
        assert state.active
        assert table() != before
    assert table() == before


def test_where_the_table_cannot_be_patched_the_reason_is_told(tmp_path: Path) -> None:
    fake = tmp_path / "libllama.so"
    fake.write_bytes(b"no library")
    with lazy_load(fake) as state:
        assert not state.active
        assert "libllama.so" in state.reason
