"""The tightest cgroup in trees of files (M3), and the machine that runs this."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertd.pages import memory

GIB = 1 << 30
_MEMINFO = "MemTotal: 67108864 kB\nMemFree: 4194304 kB\nMemAvailable: 50331648 kB\n"
_MEMINFO += "SwapTotal: 1024 kB\nSwapFree: 24 kB\n"
_V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
_V2_MOUNT = "35 31 0:32 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


class Tree:
    """A root with /proc and one cgroup hierarchy; `cgroup` writes the files of one level."""

    def __init__(self, root: Path, version: int, path: str) -> None:
        self.root, self.version = root, version
        self.write("proc/meminfo", _MEMINFO)
        self.write("proc/self/mountinfo", _V1_MOUNT if version == 1 else _V2_MOUNT)
        self.write("proc/self/cgroup", f"4:memory:{path}\n0::/\n" if version == 1 else f"0::{path}\n")

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def cgroup(self, path: str, **files: object) -> None:
        mount = "sys/fs/cgroup/memory" if self.version == 1 else "sys/fs/cgroup"
        for name, value in files.items():
            self.write(f"{mount}{path}/memory.{name}", f"{value}\n")


@pytest.fixture
def v2(tmp_path: Path) -> Tree:
    return Tree(tmp_path, 2, "/system.slice/expertd.service")


@pytest.fixture
def v1(tmp_path: Path) -> Tree:
    return Tree(tmp_path, 1, "/docker/abc")


def test_a_limit_below_the_machine(v2: Tree) -> None:
    v2.cgroup("/system.slice/expertd.service", max=2 * GIB, high="max", current=GIB, stat="active_file 1000\nanon 50")
    now = memory.snapshot(v2.root)
    assert now.cgroup is not None
    assert (now.limit_bytes, now.usable_bytes) == (2 * GIB, GIB + 1000)
    assert now.cgroup.anon_bytes == 50
    assert (now.swap_total_bytes, now.swap_used_bytes) == (1 << 20, 1000 << 10)


def test_no_limit_with_memory_full_of_file_cache(v2: Tree) -> None:
    v2.cgroup("/system.slice/expertd.service", max="max", high="max", current=60 * GIB, stat=f"active_file {59 * GIB}")
    now = memory.snapshot(v2.root)
    assert now.cgroup is None
    assert now.usable_bytes == now.available_bytes == 48 * GIB


def test_file_cache_counts_as_available(v2: Tree) -> None:
    stat = f"active_file {GIB}\ninactive_file {2 * GIB}\nunevictable {GIB // 2}"
    v2.cgroup("/system.slice/expertd.service", max=4 * GIB, current=4 * GIB, stat=stat)
    now = memory.snapshot(v2.root)
    assert now.usable_bytes == 3 * GIB
    assert now.cgroup is not None
    assert now.cgroup.unevictable_bytes == GIB // 2


def test_high_below_max(v2: Tree) -> None:
    v2.cgroup("/system.slice/expertd.service", max=8 * GIB, high=6 * GIB, current=GIB)
    assert memory.snapshot(v2.root).limit_bytes == 6 * GIB


def test_the_limit_is_on_the_grandparent(v2: Tree) -> None:
    v2.write("proc/self/cgroup", "0::/a/b/c\n")
    v2.cgroup("/a/b/c", max="max", current=GIB)
    v2.cgroup("/a/b", max=30 * GIB, current=GIB)
    v2.cgroup("/a", max=10 * GIB, current=9 * GIB)
    now = memory.snapshot(v2.root)
    assert now.cgroup is not None
    assert now.cgroup.path.name == "a"
    assert now.usable_bytes == GIB


def test_the_sentinel_of_v1_is_no_limit(v1: Tree) -> None:
    v1.cgroup("/docker/abc", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    v1.cgroup("", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    assert memory.snapshot(v1.root).cgroup is None


def test_v1_counts_with_its_children(v1: Tree) -> None:
    stat = f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\ntotal_rss 7\ntotal_unevictable 5"
    v1.cgroup("/docker/abc", limit_in_bytes=4 * GIB, usage_in_bytes=3 * GIB, stat=stat)
    v1.cgroup("/docker/abc", **{"kmem.usage_in_bytes": 11})
    now = memory.snapshot(v1.root)
    assert now.cgroup is not None
    assert now.usable_bytes == 3 * GIB
    assert (now.cgroup.anon_bytes, now.cgroup.kernel_bytes, now.cgroup.unevictable_bytes) == (7, 11, 5)


def test_a_container_sees_its_own_root(v1: Tree) -> None:
    """The path in /proc/self/cgroup is the host's, the mount shows the container's part of it."""
    v1.write("proc/self/mountinfo", _V1_MOUNT.replace(" / /sys", " /docker/abc /sys"))
    v1.cgroup("", limit_in_bytes=2 * GIB, usage_in_bytes=GIB)
    assert memory.snapshot(v1.root).limit_bytes == 2 * GIB


def test_unreadable_files_are_no_limit(v2: Tree) -> None:
    (v2.root / "sys/fs/cgroup/system.slice/expertd.service/memory.max").mkdir(parents=True)
    (v2.root / "proc/pressure").mkdir()
    v2.write("proc/pressure/memory", "some avg10=x\n")
    now = memory.snapshot(v2.root)
    assert now.cgroup is None
    assert now.pressure is None


def test_limits_of_the_machine_and_above_are_none(v2: Tree) -> None:
    v2.cgroup("/system.slice/expertd.service", max=64 * GIB, current=GIB)
    assert memory.snapshot(v2.root).cgroup is None


def test_an_empty_root_says_nothing(tmp_path: Path) -> None:
    now = memory.snapshot(tmp_path)
    assert (now.total_bytes, now.available_bytes, now.cgroup, now.pressure) == (0, 0, None, None)
    assert memory.reclaim(tmp_path) == memory.Reclaim(0, 0)


def test_pressure_is_the_cgroups_own_where_it_has_one(v2: Tree) -> None:
    line = "some avg10={0} avg60=0.00 avg300=0.00 total={1}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    v2.write("proc/pressure/memory", line.format("1.50", 2_000_000))
    now = memory.snapshot(v2.root)
    assert now.pressure == memory.Pressure(2.0, 0.0, 1.5, 0.0, True)
    v2.cgroup("/system.slice/expertd.service", max=2 * GIB, current=0, pressure=line.format("9.00", 5_000_000))
    now = memory.snapshot(v2.root)
    assert now.pressure is not None
    assert (now.pressure.some_seconds, now.pressure.machine) == (5.0, False)
    v2.cgroup("/system.slice/expertd.service", max="max")
    now = memory.snapshot(v2.root)
    assert now.cgroup is None
    assert now.pressure is not None
    assert (now.pressure.some_seconds, now.pressure.machine) == (5.0, False)


def test_refaults_are_the_cgroups_own_or_the_machines(v2: Tree) -> None:
    v2.write("proc/vmstat", "workingset_refault_file 7\npswpout 3\n")
    assert memory.reclaim(v2.root) == memory.Reclaim(7 * 4096, 3 * 4096)
    v2.cgroup("/system.slice/expertd.service", stat="workingset_refault_file 2")
    assert memory.reclaim(v2.root) == memory.Reclaim(2 * 4096, 3 * 4096)


def test_zram_is_noticed(v2: Tree) -> None:
    v2.write("proc/swaps", "Filename Type Size Used Priority\n/dev/zram0 partition 1024 0 100\n")
    assert memory.snapshot(v2.root).zram


def test_this_machine() -> None:
    now = memory.snapshot()
    assert 0 < now.usable_bytes <= now.total_bytes
    assert now.free_bytes <= now.total_bytes
