"""Fixtures every area shares: models, recorded traces, and the skips by name for what a machine lacks."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import pytest

from expertd.bench import inflate
from expertd.engine import openmp

openmp.load()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The built-in tiny MoE (8 layers x 64 experts, top-4)."""
    path = Path(str(resources.files("expertd") / "data" / "tiny-moe-q4_0.gguf"))
    assert path.is_file()
    return path


@pytest.fixture(scope="session")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with its experts padded to some 200 MB: the same words, experts of many pages."""
    path = tmp_path_factory.mktemp("big") / "tiny-moe-big.gguf"
    inflate.write(inflate.plan(200 << 20), path)
    return path


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded routing of real models, beside the project's checkout; not part of it."""
    path = Path(__file__).resolve().parents[2] / "shared" / "traces"
    if not path.is_dir():
        pytest.skip("recorded traces are not beside this checkout (../shared/traces)")
    return path


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def _memory_cgroup_writable() -> bool:
    v1 = Path("/sys/fs/cgroup/memory")
    v2 = Path("/sys/fs/cgroup/cgroup.controllers")
    if (v1 / "memory.limit_in_bytes").exists():
        return os.access(v1, os.W_OK)
    return v2.exists() and "memory" in v2.read_text().split() and os.access(v2.parent, os.W_OK)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("cgroup") and not (os.geteuid() == 0 and _memory_cgroup_writable()):
        pytest.skip("needs root and a writable memory cgroup")
    if item.get_closest_marker("linux65") and _kernel() < (6, 5):
        pytest.skip("needs cachestat(2), Linux 6.5")
    if item.get_closest_marker("browser") and not Path("/usr/bin/chromium").exists():
        pytest.skip("needs Debian's chromium at /usr/bin/chromium")
