"""Disks that fail, and daemons that meet them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fuse_disk import Disk, fuse_disk


@pytest.fixture
def disk(demo_model: Path, tmp_path: Path) -> Iterator[Disk]:
    """The built-in model on a disk that can be told to fail."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(fuse_disk(demo_model, tmp_path / "disk"))
        except OSError as error:
            pytest.skip(f"needs the right to mount: {error}")
        yield made
