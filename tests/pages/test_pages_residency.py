"""Residency is true, or it is said to be unknown: never guessed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from expertd.pages import libc, residency
from expertd.pages.mapping import MappedFiles
from expertd.types import ExpertLayout

Child = Callable[..., subprocess.CompletedProcess[str]]

_ASK = """
import json, os, sys
from pathlib import Path
from expertd.pages import residency
from expertd.pages.mapping import MappedFiles
mapping = MappedFiles.map([Path(sys.argv[1])])
f = mapping.files[0]
print(json.dumps([residency.truthful(f), residency.resident_pages(f, 0, f.nbytes)]))
"""


@pytest.mark.root
def test_a_foreign_file_is_unknown_not_resident(small: ExpertLayout, run_child: Child) -> None:
    os.chmod(small.files[0], 0o644)
    done = run_child(_ASK, str(small.files[0]), nobody=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, None]


def test_without_cachestat_the_owner_asks_mincore(small: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with MappedFiles.map(small.files) as mapping:
        f = mapping.files[0]
        os.posix_fadvise(f.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(f.fd, 1, 0)
        true = residency.resident_pages(f, 0, f.nbytes)
        monkeypatch.setattr(libc, "cachestat", lambda *_: errno.ENOSYS)
        assert residency.truthful(f)
        asked = residency.resident_pages(f, 0, f.nbytes)
        assert asked
        if true is not None:
            assert asked <= true
        assert residency.recently_evicted_pages(f, 0, f.nbytes) is None


def test_without_either_it_is_unknown(small: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with MappedFiles.map(small.files) as mapping:
        monkeypatch.setattr(libc, "cachestat", lambda *_: errno.EPERM)
        assert not residency.truthful(mapping.files[0])
        assert residency.resident_experts(mapping, small) is None
        assert residency.resident_bytes(mapping, small.extents(0)) is None


@pytest.mark.linux65
def test_cachestat_tells_errors_apart(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 10_000)
    fd = os.open(path, os.O_RDONLY)
    answer = libc.cachestat(fd, 0, 10_000)
    assert isinstance(answer, libc.CacheStat)
    assert answer.cached == 3
    os.close(fd)
    assert libc.cachestat(fd, 0, 10_000) == errno.EBADF
