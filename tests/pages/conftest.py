"""Real files of several shapes, their layouts, and child processes with other rights or in a memory cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expertd.types import ExpertLayout, ExpertTensor, Extent, MoeLayer

ROLES = ("gate", "up", "down")


def layout_of(path: Path, *, stride: int, n_experts: int, n_layers: int, header: int) -> ExpertLayout:
    """Stacked tensors end to end behind a dense header; nothing is aligned unless the numbers are."""
    at, layers = header, []
    for layer in range(n_layers):
        tensors = []
        for role in ROLES:
            tensors.append(ExpertTensor(role, f"blk.{layer}.ffn_{role}_exps.weight", 0, at, stride))
            at += stride * n_experts
        layers.append(MoeLayer(layer, n_experts, tuple(tensors)))
    return ExpertLayout((path,), (at,), n_layers, n_experts, 2, tuple(layers), (Extent(0, 0, header),))


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory on a disk: /tmp may be a tmpfs, whose pages cannot be dropped."""
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        with tempfile.TemporaryDirectory(dir=parent, prefix="expertd-pages-") as name:
            directory = Path(name)
            probe = directory / "probe"
            probe.write_bytes(b"x" * 65536)
            if _droppable(probe):
                directory.chmod(0o755)
                yield directory
                return
    pytest.skip("no directory here whose pages can be dropped")


def _droppable(path: Path) -> bool:
    from expertd.pages.disk import file_system

    return file_system(path).steerable


def write_random(path: Path, nbytes: int) -> Path:
    """Random bytes on the disk, none in the page cache."""
    block = os.urandom(1 << 20)
    with path.open("wb") as f:
        for at in range(0, nbytes, len(block)):
            f.write(block[: min(len(block), nbytes - at)])
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ExpertLayout]:
    """Layout and file by numbers: `make_model(path, stride=, n_experts=, n_layers=, header=)`."""

    def make(path: Path, **numbers: int) -> ExpertLayout:
        layout = layout_of(path, **numbers)
        if not path.exists():
            write_random(path, layout.file_nbytes[0])
        return layout

    return make


@pytest.fixture(scope="session")
def small(scratch: Path) -> ExpertLayout:
    """2 layers x 8 experts of 3 x 50,001 bytes: every border is shared."""
    path = scratch / "small"
    layout = layout_of(path, stride=50_001, n_experts=8, n_layers=2, header=7_000)
    write_random(path, layout.file_nbytes[0])
    return layout


@pytest.fixture(scope="session")
def large(scratch: Path) -> ExpertLayout:
    """2 layers x 16 experts of 3 x 700,032 bytes: long enough for windows."""
    path = scratch / "large"
    layout = layout_of(path, stride=700_032, n_experts=16, n_layers=2, header=4_128)
    write_random(path, layout.file_nbytes[0])
    return layout


@pytest.fixture(scope="session")
def run_child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in a child of its own; `user` nobody drops root and its capabilities first."""

    def run(source: str, *args: str, nobody: bool = False, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        drop = "import os\nos.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        # Imports come first: nobody may not be able to read the checkout.
        early = "import json, logging, resource, ctypes, mmap, threading, time\n"
        early += "import expertd.pages.pager, expertd.pages.worker, expertd.pages.budget\n"
        code = early + (drop if nobody else "") + source
        return subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
