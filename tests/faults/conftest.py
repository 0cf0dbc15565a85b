"""Disks that fail, and daemons that meet them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fuse_disk import Disk, fuse_disk


@pytest.fixture
def disk(demo_model: Path, tmp_path: Path) -> Iterator[Disk]:
    """The built-in model on a disk that can be told to fail."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    with fuse_disk(demo_model, tmp_path / "disk") as made:
        yield made
