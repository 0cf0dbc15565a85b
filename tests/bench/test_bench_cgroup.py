from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from expertd.bench import cgroup, pagecache
from expertd.bench.cgroup import memory_group
from expertd.errors import BenchError


@pytest.mark.cgroup
def test_the_limit_holds_page_cache_too(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(96 << 20))
    pagecache.drop([big])
    with memory_group(48 << 20) as group:
        done = subprocess.run(group.command(["cat", str(big)]), stdout=subprocess.DEVNULL, check=False)
        peak = group.peak_bytes()
        path = group.path
    assert done.returncode == 0
    assert peak is None or peak <= 48 << 20
    cached = pagecache.cached_nbytes(big)
    assert cached is None or cached <= 48 << 20
    assert not path.exists()


@pytest.mark.cgroup
def test_a_kill_for_memory_is_counted() -> None:
    with memory_group(48 << 20) as group:
        script = "data = bytearray(200 << 20)"
        done = subprocess.run(group.command([sys.executable, "-c", script]), capture_output=True, check=False)
        assert done.returncode != 0
        assert group.oom_kills() == 1


@pytest.mark.cgroup
def test_the_group_goes_after_an_error() -> None:
    with pytest.raises(RuntimeError), memory_group(64 << 20) as group:
        raise RuntimeError
    assert not group.path.exists()


def test_without_root_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.os, "geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="needs root") as caught, memory_group(1 << 30):
        pass
    assert "--memory none" in caught.value.hint


def _proc(root: Path, mounts: str, own: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text(mounts)
    (root / "proc/self/cgroup").write_text(own)
    return root


V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"


def test_v2_climbs_to_the_group_that_hands_memory_down(tmp_path: Path) -> None:
    root = _proc(tmp_path, V2, "0::/user.slice/user-0.slice/session-1.scope\n")
    top = root / "sys/fs/cgroup"
    scope = top / "user.slice/user-0.slice/session-1.scope"
    scope.mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory pids\n")
    (scope / "cgroup.subtree_control").write_text("\n")
    (scope.parent / "cgroup.subtree_control").write_text("memory pids\n")
    assert cgroup._parent(root) == (2, scope.parent)


def test_v2_asks_the_top_when_none_does(tmp_path: Path) -> None:
    root = _proc(tmp_path, V2, "0::/\n")
    top = root / "sys/fs/cgroup"
    top.mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory\n")
    (top / "cgroup.subtree_control").write_text("cpu\n")
    assert cgroup._parent(root) == (2, top)
    assert (top / "cgroup.subtree_control").read_text() == "+memory"


def test_v1_stays_under_its_own_group(tmp_path: Path) -> None:
    mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    root = _proc(tmp_path, mounts + V2, "4:memory:/box/inner\n1:cpu:/\n0::/\n")
    own = root / "sys/fs/cgroup/memory/box/inner"
    assert cgroup._parent(root)[1] == root / "sys/fs/cgroup/memory", "in a container its path may not be there"
    own.mkdir(parents=True)
    assert cgroup._parent(root) == (1, own)


def test_no_memory_controller(tmp_path: Path) -> None:
    root = _proc(tmp_path, "proc /proc proc rw 0 0\n", "0::/\n")
    with pytest.raises(BenchError, match="no cgroup controls memory"):
        cgroup._parent(root)


@pytest.mark.linux65
def test_a_dropped_file_is_cold(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (4 << 20))
    assert (pagecache.cached_nbytes(path) or 0) >= 4 << 20
    assert pagecache.drop([path]) == 0
    assert pagecache.cached_nbytes(path) == 0
