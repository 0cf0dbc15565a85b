"""Device limits and file systems from trees of files, and a probe of the disk that is here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expertd.errors import PagesError
from expertd.pages import disk
from expertd.types import ExpertLayout


def _device(path: Path) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_limits_of_a_disk(tmp_path: Path) -> None:
    root, name = tmp_path / "root", _device(tmp_path)
    _write(root / "sys/class/bdi" / name / "read_ahead_kb", "8192\n")
    _write(root / "sys/dev/block" / name / "queue/max_sectors_kb", "1280\n")
    assert disk.read_limits(tmp_path, root) == disk.ReadLimits(8192, 1280, True)


def test_a_partition_has_the_limits_of_its_disk(tmp_path: Path) -> None:
    root, name = tmp_path / "root", _device(tmp_path)
    partition = root / "sys/devices/disk/part"
    partition.mkdir(parents=True)
    _write(root / "sys/devices/disk/queue/max_sectors_kb", "512\n")
    _write(root / "sys/devices/disk/queue/read_ahead_kb", "256\n")
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / name).symlink_to(partition)
    assert disk.read_limits(tmp_path, root) == disk.ReadLimits(256, 512, True)


def test_unknown_limits_are_the_kernels_defaults(tmp_path: Path) -> None:
    assert disk.read_limits(tmp_path, tmp_path) == disk.ReadLimits(128, 128, False)


@pytest.mark.parametrize(
    ("kind", "steerable"),
    [("ext4", True), ("xfs", True), ("btrfs", True), ("fuseblk", True), ("9p", False), ("zfs", False),
     ("fuse.sshfs", False), ("tmpfs", False), ("drvfs", False)],
)  # fmt: skip
def test_file_systems(tmp_path: Path, kind: str, steerable: bool) -> None:
    _write(
        tmp_path / "proc/self/mountinfo",
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /models\\040here rw shared:1 - {kind} x rw\n",
    )
    found = disk.file_system(Path("/models here/x.gguf"), tmp_path)
    assert (found.kind, found.mount, found.steerable) == (kind, "/models here", steerable)
    assert bool(found.reason) is not steerable
    assert disk.file_system(Path("/models"), tmp_path).kind == "ext4"


def test_a_probe_reads_past_the_page_cache(large: ExpertLayout) -> None:
    speed = disk.probe(large.files[0], nbytes=16 << 20)
    assert speed.sequential > 0
    assert speed.random > 0
    assert speed.read_bytes == 24 << 20


def test_what_cannot_be_probed_is_said(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")
    with pytest.raises(PagesError, match="too small"):
        disk.probe(tmp_path / "tiny")
