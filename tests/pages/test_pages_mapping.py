"""Finding mappings, noticing that a file changed (M6), and outliving one that was cut."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from expertd.errors import ModelChangedError, ModelNotFoundError, PagesError
from expertd.pages import libc
from expertd.pages.mapping import MappedFiles
from expertd.types import Extent

Child = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(os.urandom(300_000))
    return path


def test_a_mapping_that_is_there_is_found_with_what_it_covers(file: Path) -> None:
    with MappedFiles.map([file]) as made, MappedFiles.adopt([file]) as found:
        assert found.files[0].base == made.files[0].base
        assert found.files[0].covered == ((0, 300_000),)
        libc.unmap(made.files[0].base + 20 * libc.PAGE, 10 * libc.PAGE)
        with MappedFiles.adopt([file]) as holed:
            assert holed.files[0].covered == ((0, 20 * libc.PAGE), (30 * libc.PAGE, 300_000))
            assert holed.files[0].base == made.files[0].base
            page = libc.PAGE
            around = list(holed.clip([Extent(0, 19 * page, 20 * page), Extent(0, 22 * page, page)]))
            assert around == [Extent(0, 19 * page, page), Extent(0, 30 * page, 9 * page)]


def test_a_link_is_followed(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    with MappedFiles.map([file]) as made, MappedFiles.adopt([link]) as found:
        assert found.files[0].base == made.files[0].base


def test_a_file_that_is_not_mapped_is_said(file: Path) -> None:
    with pytest.raises(PagesError, match="is not mapped"):
        MappedFiles.adopt([file])


def test_missing_and_empty_files(tmp_path: Path, file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelNotFoundError, match="cannot open"):
        MappedFiles.map([file, tmp_path / "none"])
    (tmp_path / "empty").touch()
    with pytest.raises(PagesError, match="cannot map"):
        MappedFiles.map([file, tmp_path / "empty"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_gives_back_what_was_taken(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mapping = MappedFiles.map([file])
    mapping.close()
    mapping.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(file) not in Path("/proc/self/maps").read_text()


def _cut(path: Path) -> None:
    os.truncate(path, 1000)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def _rewrite(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as f:
        f.write(b"new")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cut, "was cut by 299000 bytes"),
        (_replace, "was replaced by another file"),
        (_rewrite, "was rewritten in place"),
        (Path.unlink, "is gone"),
    ],
)
def test_a_change_is_noticed_and_named(file: Path, change: Callable[[Path], None], said: str) -> None:
    with MappedFiles.map([file]) as mapping:
        mapping.check()
        change(file)
        with pytest.raises(ModelChangedError, match=said) as error:
            mapping.check()
        assert str(file) in error.value.message


_GUARDED = """
import os, sys, threading
from pathlib import Path
from expertd.errors import ModelChangedError
from expertd.pages.guard import BusGuard
from expertd.pages.mapping import MappedFiles
path = Path(sys.argv[1])
mapping = MappedFiles.map([path])
guard = BusGuard([path])
if sys.argv[2] == "guarded":
    guard.install()
    assert guard.installed
base, size = mapping.files[0].base, mapping.files[0].nbytes
guard.check()
assert guard.mended == 0
os.truncate(path, 100_000)
read = ctypes.CDLL(None).memchr
read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
found = []
def compute(): found.append(read(base + 150_000, 1, size - 150_000))
threads = [threading.Thread(target=compute) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(found)
try:
    guard.check()
except ModelChangedError as error:
    print(error.line())
assert guard.mended == 1
guard.close()
"""


def test_a_fault_beyond_the_end_is_outlived_and_told(file: Path, run_child: Child) -> None:
    done = run_child(_GUARDED, str(file), "guarded")
    assert done.returncode == 0, done.stderr
    assert "[None, None, None, None]" in done.stdout
    assert f"{file} was cut by 200000 bytes while it was in use; restart" in done.stdout
    assert done.stderr.count("was cut by") == 1


def test_without_a_guard_the_same_fault_kills(file: Path, run_child: Child) -> None:
    assert run_child(_GUARDED, str(file), "bare").returncode == -signal.SIGBUS


_FOREIGN = """
import os, sys
from pathlib import Path
from expertd.pages.guard import BusGuard
from expertd.pages.mapping import MappedFiles
guarded, other = MappedFiles.map([Path(sys.argv[1])]), MappedFiles.map([Path(sys.argv[2])])
BusGuard([Path(sys.argv[1])]).install()
os.truncate(sys.argv[2], 0)
ctypes.string_at(other.files[0].base, 1)
"""


def test_a_fault_elsewhere_kills_as_ever(file: Path, tmp_path: Path, run_child: Child) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 10_000)
    assert run_child(_FOREIGN, str(file), str(other)).returncode == -signal.SIGBUS
