"""Profiles on disk: whole or not there, whatever happens; what cannot be used is set aside and said."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.errors import StateError
from expertd.runtime.profile import Profile, Shape
from expertd.runtime.profile_file import (
    ProfileDirectory,
    decode,
    describe,
    document,
    encode,
    from_document,
    models,
    write_atomically,
)
from tests.profiles.conftest import SHAPE, taught

Mounted = Callable[..., AbstractContextManager[Path]]


def test_what_is_written_is_what_is_read() -> None:
    profile = taught()
    profile.sources = ("imatrix x.gguf", "profile a")
    read = decode(encode(profile))
    assert read.shape == profile.shape
    assert (read.name, read.tokens, read.sources) == ("demo", 200, profile.sources)
    assert read.counts == pytest.approx(profile.counts, abs=1e-3)
    assert read.hottest()[:8] == profile.hottest()[:8]


def test_a_person_can_read_it() -> None:
    first, second, rest = encode(taught()).split(b"\n")
    head = json.loads(first)
    assert head["format"] == "expertd-profile"
    assert head["tokens"] == 200
    assert len(json.loads(second)["counts"]) == 4
    assert rest == b""


def test_a_document_goes_over_http_and_back() -> None:
    profile = taught()
    assert from_document(json.loads(json.dumps(document(profile)))).counts == pytest.approx(profile.counts, abs=1e-3)
    assert from_document(document(profile), "other").name == "other"


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [[1.0] * 16] * 3},
        {"counts": [[1.0] * 15] * 4},
        {"counts": [[-1.0] * 16] * 4},
        {"counts": "none"},
        {"layers": 0},
        {"layers": 1 << 30},
        {"fingerprint": "../../x"},
        {"format": "another"},
        {"min_reader": 99},
        {"half_life": 0},
        {"tokens": -1},
    ],
)
def test_a_document_that_is_no_profile_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(StateError):
        from_document({**document(taught()), **change})


def test_torn_at_any_byte_is_said() -> None:
    data = encode(taught())
    for end in range(0, len(data), 7):
        with pytest.raises(StateError, match=r"torn|damaged|foreign"):
            decode(data[:end])
    with pytest.raises(StateError, match="torn: the file is empty"):
        decode(b"")


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 7))
def test_a_flipped_bit_never_goes_unnoticed_in_the_counts(place: int, bit: int) -> None:
    data = bytearray(encode(taught()))
    start = data.index(b"\n") + 1
    data[start + place % (len(data) - start)] ^= 1 << bit
    with pytest.raises(StateError):
        decode(bytes(data))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_anything_else_is_refused_in_one_line(data: bytes) -> None:
    for found in (data, encode(taught())[:150] + data, b"\0" + data + encode(taught())):
        with pytest.raises(StateError) as caught:
            decode(found)
        assert "\n" not in caught.value.message


def test_a_newer_writer_is_read_unless_it_says_no() -> None:
    head, body = encode(taught()).split(b"\n", 1)
    fields = {**json.loads(head), "version": 9, "a_new_field": {"x": 1}}
    assert decode(json.dumps(fields).encode() + b"\n" + body).tokens == 200
    fields["min_reader"] = 9
    with pytest.raises(StateError, match="format 9; this one reads up to 1") as caught:
        describe(json.dumps(fields).encode() + b"\n" + body)
    assert caught.value.hint == "upgrade expertd"


def _directory(state: Path) -> ProfileDirectory:
    directory = ProfileDirectory(state, SHAPE.fingerprint)
    directory.open()
    return directory


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "torn: the file is empty"),
        (encode(taught())[:-9], "torn"),
        (b"GGUF\x03\0\0\0", "foreign"),
        (encode(taught(shape=Shape("f" * 32, "another", 4, 16, 2))), "another model"),
        (encode(taught(shape=Shape(SHAPE.fingerprint, "a-model", 4, 8, 2), tokens=3)), "another model"),
    ],
)
def test_what_cannot_be_used_is_set_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, said: str
) -> None:
    directory = _directory(tmp_path)
    path = directory.file("demo")
    for n in (1, 2):
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert directory.load("demo", SHAPE) is None
        assert not path.exists()
        assert path.with_name(f"demo.profile.bad-{n}").read_bytes() == content
    assert said in caplog.text
    assert "set aside as demo.profile.bad-2" in caplog.text
    assert directory.names() == []


def test_models_never_meet(tmp_path: Path) -> None:
    other = Shape("f" * 32, "another", 2, 8, 1)
    for shape in (SHAPE, other):
        directory = ProfileDirectory(tmp_path, shape.fingerprint)
        directory.open()
        directory.write(taught("default", shape=shape, tokens=5) if shape is SHAPE else Profile.empty("default", shape))
        directory.close()
    assert models(tmp_path) == sorted([SHAPE.fingerprint, other.fingerprint])
    assert _directory(tmp_path).load("default", SHAPE).tokens == 5  # type: ignore[union-attr]


def test_a_copied_file_has_its_files_name(tmp_path: Path) -> None:
    directory = _directory(tmp_path)
    directory.file("copy").write_bytes(encode(taught("demo")))
    loaded = directory.load("copy", SHAPE)
    assert loaded is not None
    assert loaded.name == "copy"


def test_a_second_daemon_does_not_write_over_the_first(tmp_path: Path) -> None:
    first = _directory(tmp_path)
    second = ProfileDirectory(tmp_path, SHAPE.fingerprint)
    with pytest.raises(StateError, match="another process keeps these profiles"):
        second.open()
    first.close()
    second.open()


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    directory = _directory(tmp_path)
    left = directory.path / ".demo.profile.tmp-1-abcd"
    left.write_bytes(b"half")
    directory.close()
    directory.open()
    assert not left.exists()


WRITER = """
import sys
from pathlib import Path
from expertd.runtime.profile_file import ProfileDirectory
from tests.profiles.conftest import SHAPE, taught
directory = ProfileDirectory(Path(sys.argv[1]), SHAPE.fingerprint)
directory.open()
profile = taught(tokens=20)
print("go", flush=True)
while True:
    profile.tokens += 1
    directory.write(profile)
"""


def test_kill_9_while_saving_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    seen = []
    for turn in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.013 * turn)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        directory = _directory(tmp_path)
        found = directory.load("demo", SHAPE)
        assert found is not None
        assert not list(directory.path.glob("*.bad-*"))
        assert not list(directory.path.glob(".*.tmp-*"))
        directory.close()
        seen.append(found.tokens)
    assert max(seen) > 21


@pytest.mark.root
def test_a_full_disk_leaves_the_old_one_and_nothing_else(mounted: Mounted) -> None:
    with mounted("size=64k") as state:
        directory = _directory(state)
        directory.write(taught(tokens=10))
        filler = state / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb") as f:
            f.write(b"x" * (1 << 20))
        with pytest.raises(StateError, match="No space left on device"):
            directory.write(taught(tokens=20))
        kept = directory.load("demo", SHAPE)
        assert kept is not None
        assert kept.tokens == 10
        assert not list(directory.path.glob(".*.tmp-*"))
        filler.unlink()
        directory.write(taught(tokens=20))


@pytest.mark.root
def test_a_read_only_directory_is_said(mounted: Mounted) -> None:
    with mounted("size=64k") as state:
        directory = _directory(state)
        directory.write(taught(tokens=10))
        directory.file("torn").write_bytes(b"")
        directory.close()
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)
        with pytest.raises(StateError, match="cannot be written: Read-only file system"):
            directory.open()
        with pytest.raises(StateError, match="Read-only"):
            directory.write(taught(tokens=20))
        kept = directory.load("demo", SHAPE)
        assert kept is not None
        assert kept.tokens == 10
        assert directory.load("torn", SHAPE) is None
        assert directory.file("torn").exists()


def test_an_error_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.profile"
    write_atomically(path, b"old")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StateError, match="Input/output error"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.profile"]
    assert path.read_bytes() == b"old"
