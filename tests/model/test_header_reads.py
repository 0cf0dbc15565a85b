"""Reading a header brings into the page cache what was read, whatever read-ahead the disk is set to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from expertd.bench import pagecache
from expertd.model.cursor import WINDOW_NBYTES
from expertd.model.fingerprint import fingerprint
from expertd.model.gguf import read_model

_SAMPLES_NBYTES = 64 * 2 * 4096
"""64 samples of 4 KiB, none on a border of pages."""


@pytest.mark.linux65
def test_no_read_ahead_drags_weights_in(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cold.gguf"
    shutil.copyfile(demo_model, path)
    if pagecache.drop([path]):
        pytest.skip("the file system under the temporary directory does not drop pages (tmpfs)")
    model = read_model(path)
    header = pagecache.cached_nbytes(path)
    assert header is not None
    assert header <= WINDOW_NBYTES + 4096
    fingerprint(model)
    assert (pagecache.cached_nbytes(path) or 0) <= header + _SAMPLES_NBYTES
