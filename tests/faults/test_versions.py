"""Upgrade and downgrade: format 1 is read for good, and what a newer expertd wrote is not lost to an older one."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from expertd.errors import StateError
from expertd.runtime.profile import Profile
from expertd.runtime.profile_file import ProfileDirectory, decode, encode
from expertd.runtime.trace_file import MAGIC, TraceWriter, make_room
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase
from tests.daemon.conftest import daemon, environment

DATA = Path(__file__).parent / "data"
PROFILE, TRACE = DATA / "format-1.profile", DATA / "format-1.trace"


def _changed(data: bytes, **fields: object) -> bytes:
    """A profile's file with other fields in its first line."""
    head, body = data.split(b"\n", 1)
    return json.dumps({**json.loads(head), **fields}).encode() + b"\n" + body


NEWER = _changed(PROFILE.read_bytes(), version=9, min_reader=9, expertd="9.0.0", a_new_field=[1, 2])
LATER = _changed(PROFILE.read_bytes(), version=9, expertd="9.0.0", a_new_field=[1, 2])
NEWER_TRACE = MAGIC + (9).to_bytes(2, "little") + TRACE.read_bytes()[10:]


def test_a_profile_of_format_1_is_read() -> None:
    profile = decode(PROFILE.read_bytes())
    assert (profile.name, profile.tokens, profile.version) == ("default", 26, "0.1.0")
    assert (profile.shape.n_layers, profile.shape.n_experts, profile.shape.n_used) == (8, 64, 4)
    assert sum(profile.counts) == 780
    assert profile.hottest()[:5] == [387, 370, 452, 376, 475]


def test_a_trace_of_format_1_is_read() -> None:
    trace = load_trace(TRACE)
    assert (trace.model, trace.n_layers, trace.n_experts, trace.k) == ("tiny-moe-q4_0", 8, 64, 4)
    assert (len(trace.routes), trace.n_tokens(Phase.PREFILL), trace.n_tokens(Phase.DECODE)) == (160, 6, 19)
    assert trace.routes[-1].ids == (27, 4, 58, 32)
    assert set(trace.expert_bytes.values()) == {13824}


def test_a_trace_with_more_in_its_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "later.trace"
    prefix = TRACE.read_bytes()
    length = int.from_bytes(prefix[12:16], "little")
    header = json.dumps({**json.loads(prefix[16 : 16 + length]), "a_new_field": {"x": 1}}).encode()
    path.write_bytes(prefix[:12] + len(header).to_bytes(4, "little") + header + prefix[16 + length :])
    assert load_trace(path).routes == load_trace(TRACE).routes


def _directory(state: Path) -> tuple[ProfileDirectory, Profile]:
    profile = decode(PROFILE.read_bytes())
    directory = ProfileDirectory(state, profile.shape.fingerprint)
    directory.open()
    return directory, profile


def test_a_profile_of_a_later_version_that_says_so_is_read_and_written_again(tmp_path: Path) -> None:
    directory, profile = _directory(tmp_path)
    directory.file("default").write_bytes(LATER)
    loaded = directory.load("default", profile.shape)
    assert loaded is not None
    assert loaded.counts == profile.counts
    directory.write(loaded)
    assert json.loads(directory.file("default").read_bytes().split(b"\n")[0])["version"] == 1


def test_a_profile_of_a_newer_format_is_set_aside_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, profile = _directory(tmp_path)
    path = directory.file("default")
    for n in (1, 2):
        path.write_bytes(NEWER)
        with caplog.at_level(logging.WARNING):
            assert directory.load("default", profile.shape) is None
        assert path.with_name(f"default.profile.newer-{n}").read_bytes() == NEWER
    assert "written by expertd 9.0.0 in format 9; this one reads up to 1; upgrade expertd" in caplog.text
    assert "set aside as default.profile.newer-1" in caplog.text


def test_nor_is_it_written_over_unread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, profile = _directory(tmp_path)
    path = directory.file("default")
    path.write_bytes(NEWER)
    with caplog.at_level(logging.WARNING):
        directory.write(profile)
    assert path.read_bytes() == encode(profile)
    assert path.with_name("default.profile.newer-1").read_bytes() == NEWER
    assert "set aside as default.profile.newer-1" in caplog.text
    path.write_bytes(b"torn")
    directory.write(profile)
    assert path.read_bytes() == encode(profile)


def test_a_trace_makes_room_for_the_next_but_for_a_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "routes.trace"
    assert make_room(path) is None
    for harmless in (b"", MAGIC[:5], TRACE.read_bytes()[:12], TRACE.read_bytes()):
        path.write_bytes(harmless)
        assert make_room(path) is None
        assert path.read_bytes() == harmless
    path.write_bytes(NEWER_TRACE)
    assert make_room(path) == tmp_path / "routes.trace.newer-1"
    assert not path.exists()
    assert (tmp_path / "routes.trace.newer-1").read_bytes() == NEWER_TRACE
    path.write_bytes(b"GGUF and no trace")
    with pytest.raises(StateError, match="is there and is no trace of expertd"):
        make_room(path)
    assert path.read_bytes() == b"GGUF and no trace"
    TraceWriter(tmp_path / "fresh.trace", {}).close()
    assert make_room(tmp_path / "fresh.trace") is None


def test_replay_names_a_newer_trace(tmp_path: Path) -> None:
    path = tmp_path / "newer.trace"
    path.write_bytes(NEWER_TRACE)
    done = subprocess.run(
        [sys.executable, "-m", "expertd", "replay", str(path), "--policy", "lru", "--budget", "25%"],
        capture_output=True, text=True, timeout=120, check=False, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    said = f"expertd: {path}: is of version 9; this expertd reads up to 1; upgrade expertd"
    assert done.stderr.strip() == said


def test_a_daemon_after_a_downgrade(demo_model: Path, tmp_path: Path) -> None:
    """Its profile and its trace are of a newer expertd: both are named and kept, and it serves and learns."""
    shape = decode(PROFILE.read_bytes()).shape
    directory = tmp_path / "profiles" / shape.fingerprint
    directory.mkdir(parents=True)
    (directory / "default.profile").write_bytes(NEWER)
    (directory / "later.profile").write_bytes(LATER)
    (tmp_path / "routes.trace").write_bytes(NEWER_TRACE)
    with daemon(demo_model, tmp_path, "--threads", "1", "--set", "trace.enabled=true") as running:
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
        assert running.http.post("/v1/completions", json=body).status_code == 200
        names = {p["name"]: p["tokens"] for p in running.admin.get("/expertd/profiles").json()["profiles"]}
        assert names["later"] == 26
        assert running.stop() == 0
        assert "written by expertd 9.0.0 in format 9" in running.log
        assert "was written by a newer expertd: set aside as routes.trace.newer-1" in running.log
    assert (directory / "default.profile.newer-1").read_bytes() == NEWER
    assert (tmp_path / "routes.trace.newer-1").read_bytes() == NEWER_TRACE
    assert decode((directory / "default.profile").read_bytes()).tokens > 0
    assert load_trace(tmp_path / "routes.trace").routes
