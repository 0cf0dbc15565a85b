"""Exactness of reads at several read-ahead settings, each on a loop device of its own, against a model of the cache."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expertd.pages import libc, ranges
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from expertd.pages.windows import _read_bytes
from expertd.types import ExpertLayout

pytestmark = [pytest.mark.root, pytest.mark.linux65]


@pytest.fixture(scope="module")
def volume(scratch: Path) -> Iterator[tuple[Path, Path]]:
    """(mount point of an ext4 on a loop device, the device's read_ahead_kb)."""
    if not all(shutil.which(tool) for tool in ("mkfs.ext4", "losetup", "mount", "umount")):
        pytest.skip("needs mkfs.ext4, losetup and mount")
    image, point = scratch / "image", scratch / "volume"
    point.mkdir()
    with image.open("wb") as f:
        f.truncate(160 << 20)

    def call(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no loop device can be mounted here: {done.stderr.strip()}")
        return done.stdout.strip()

    call("mkfs.ext4", "-q", image)
    device = call("losetup", "--find", "--show", image)
    try:
        call("mount", device, point)
        try:
            yield point, Path("/sys/block") / Path(device).name / "queue/read_ahead_kb"
        finally:
            call("umount", point)
    finally:
        call("losetup", "--detach", device)
        image.unlink()


@pytest.mark.parametrize("stride", [700_032, 884_736, 230_001])
@pytest.mark.parametrize("ahead_kb", [128, 512, 8192])
def test_a_walk_of_fetches_and_evictions(
    volume: tuple[Path, Path], make_model: Callable[..., ExpertLayout], ahead_kb: int, stride: int
) -> None:
    point, setting = volume
    setting.write_text(str(ahead_kb))
    layout = make_model(point / f"model-{stride}", stride=stride, n_experts=12, n_layers=2, header=4_128)
    with MappedFiles.map(layout.files) as mapping:
        pager = Pager(layout, mapping)
        pager.drop_files()
        mode = pager.calibrate()
        pager.drop_files()
        _walk(pager, random.Random(stride))
        assert mode == "plain" or pager.windows > 0
        assert pager.fetch_errors == pager.counters.evict_errors == 0
        pager.close()


def _walk(pager: Pager, picks: random.Random) -> None:
    layout, held = pager.layout, set[int]()
    for _ in range(40):
        wanted = sorted(picks.sample(range(24), 4))
        # A token asks for all, also for what is there.
        pager.fetch(wanted)
        pager.wait(wanted)
        held.update(wanted)
        gone = picks.sample(sorted(held), max(0, len(held) - 10))
        pager.evict(gone)
        held.difference_update(gone)
        there = _cached(pager)
        assert _pages(layout, held) <= there
        # What may stay beyond that are the borders of whole tensors.
        assert len(there - _pages(layout, held)) <= 2 * 3 * 2 + 1


def _pages(layout: ExpertLayout, experts: set[int]) -> set[int]:
    found: set[int] = set()
    for expert in experts:
        for e in layout.extents(expert):
            first, last = ranges.span(e.offset, e.end, libc.PAGE)
            found.update(range(first // libc.PAGE, last // libc.PAGE))
    return found


def _cached(pager: Pager) -> set[int]:
    f = pager.mapping.files[0]
    vector = libc.mincore(f.base, f.nbytes)
    assert vector is not None
    return {i for i, byte in enumerate(vector) if byte & 1}


def test_the_kernels_count_of_bytes_read_is_that_of_the_pages(large: ExpertLayout) -> None:
    """What calibration relies on."""
    fd = os.open(large.files[0], os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = _read_bytes()
    for at in range(0, 1 << 20, 128 << 10):
        os.posix_fadvise(fd, at, 128 << 10, os.POSIX_FADV_WILLNEED)
    assert _read_bytes() - before == 1 << 20
    os.close(fd)
