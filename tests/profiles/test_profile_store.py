"""The profiles of a running model: who is taught, what is saved, and a disk that does not let it."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from expertd.errors import ProfileNotFoundError, RequestError, StateError
from expertd.runtime import profiles as store
from expertd.runtime.profile import Shape
from expertd.runtime.profile_file import ProfileDirectory
from expertd.runtime.profiles import NOBODY, Profiles
from expertd.types import Phase
from tests.profiles.conftest import SHAPE, taught

Mounted = Callable[..., AbstractContextManager[Path]]


def _open(state: Path | None, **settings: object) -> Profiles:
    directory = ProfileDirectory(state, SHAPE.fingerprint) if state is not None else None
    made = Profiles(SHAPE, directory, **settings)  # type: ignore[arg-type]
    made.open()
    return made


def _request(profiles: Profiles, name: str | None, expert: int, tokens: int = 3) -> None:
    profiles.begin(name)
    for _ in range(tokens):
        for layer in range(SHAPE.n_layers):
            profiles.observe(layer, [expert, expert + 1], Phase.DECODE)
    profiles.end(tokens)


def test_a_request_teaches_the_profile_it_names_and_no_other() -> None:
    profiles = _open(None)
    _request(profiles, None, 0)
    _request(profiles, "code", 8)
    _request(profiles, NOBODY, 4)
    assert profiles.get("default").hottest()[:2] == [0, 1]
    assert profiles.get("code").hottest()[:2] == [8, 9]
    assert [(r["name"], r["tokens"], r["default"]) for r in profiles.list()] == [
        ("code", 3, False),
        ("default", 3, True),
    ]
    assert profiles.get("default").chances()[4] == 0.0


def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    first = _open(tmp_path)
    first.start()
    _request(first, None, 0)
    _request(first, "code", 8)
    first.stop()
    again = _open(tmp_path)
    assert again.open().tokens == 3
    assert again.get("code").hottest()[:2] == [8, 9]
    assert [r["saved"] for r in again.list()] == [True, True]


def test_it_is_saved_every_few_seconds(tmp_path: Path) -> None:
    profiles = _open(tmp_path, seconds=0.05)
    profiles.start()
    _request(profiles, None, 0)
    end = time.monotonic() + 10
    while not profiles.saves and time.monotonic() < end:
        time.sleep(0.01)
    assert ProfileDirectory(tmp_path, SHAPE.fingerprint).read("default").tokens == 3  # type: ignore[union-attr]
    profiles.stop()


def test_nothing_is_written_when_nothing_was_learnt(tmp_path: Path) -> None:
    profiles = _open(tmp_path)
    _request(profiles, None, 0, tokens=0)
    profiles.stop()
    assert ProfileDirectory(tmp_path, SHAPE.fingerprint).names() == []


def test_names_from_requests_are_checked_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_PROFILES", 3)
    profiles = _open(None)
    for name in ("a", "b"):
        profiles.check(name)
        _request(profiles, name, 0)
    profiles.check("b")
    with pytest.raises(StateError, match="as many as may be"):
        profiles.check("c")
    with pytest.raises(RequestError):
        profiles.check("../c")


def test_rename_merge_delete(tmp_path: Path) -> None:
    profiles = _open(tmp_path)
    _request(profiles, "a", 0)
    _request(profiles, "b", 8)
    assert profiles.merge(["a", "b"], "both")
    assert profiles.get("both").tokens == 6
    assert profiles.rename("a", "c")
    with pytest.raises(StateError, match="already"):
        profiles.rename("b", "c")
    with pytest.raises(ProfileNotFoundError):
        profiles.get("a")
    profiles.delete("b")
    profiles.save()
    assert ProfileDirectory(tmp_path, SHAPE.fingerprint).names() == ["both", "c"]
    with pytest.raises(ProfileNotFoundError):
        profiles.delete("b")
    with pytest.raises(ProfileNotFoundError):
        profiles.get("../../etc/passwd")


def test_one_that_is_replaced_while_it_is_taught_goes_on_learning() -> None:
    profiles = _open(None)
    profiles.begin("demo")
    profiles.put(taught(hot=8))
    before = profiles.get("demo").counts[0]
    for layer in range(SHAPE.n_layers):
        profiles.observe(layer, [0, 1], Phase.DECODE)
    profiles.end(1)
    found = profiles.get("demo")
    assert found.tokens == 201
    assert found.counts[0] == before + 1.0


def test_another_models_profile_is_refused() -> None:
    with pytest.raises(StateError, match="another model"):
        _open(None).put(taught(shape=Shape("f" * 32, "b", 4, 16, 2)))


def test_a_torn_file_is_no_profile_and_does_not_come_back(tmp_path: Path) -> None:
    directory = ProfileDirectory(tmp_path, SHAPE.fingerprint)
    directory.open()
    directory.file("default").write_bytes(b"{")
    directory.file("code").write_bytes(b"")
    directory.close()
    profiles = _open(tmp_path)
    assert profiles.open().blank
    assert [r["name"] for r in profiles.list()] == ["default"]
    assert sorted(p.name for p in directory.path.glob("*.bad-1")) == ["code.profile.bad-1", "default.profile.bad-1"]


@pytest.mark.root
def test_a_full_disk_costs_nothing_but_the_disk(mounted: Mounted, caplog: pytest.LogCaptureFixture) -> None:
    with mounted("size=64k") as state:
        profiles = _open(state)
        _request(profiles, None, 0)
        profiles.save()
        filler = state / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb") as f:
            f.write(b"x" * (1 << 20))
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                _request(profiles, None, 0)
                profiles.save()
        assert caplog.text.count("No space left on device") == 1
        assert profiles.get("default").tokens == 12
        assert profiles.trouble
        assert (profiles.saves, profiles.save_failures) == (1, 3)
        last = profiles.saved_at
        assert last is not None
        kept = ProfileDirectory(state, SHAPE.fingerprint).read("default")
        assert kept is not None
        assert kept.tokens == 3
        filler.unlink()
        profiles.save()
        assert not profiles.trouble
        assert (profiles.saves, profiles.save_failures) == (2, 3)
        assert profiles.saved_at is not None
        assert profiles.saved_at > last
        assert ProfileDirectory(state, SHAPE.fingerprint).read("default").tokens == 12  # type: ignore[union-attr]
        profiles.stop()


@pytest.mark.root
def test_a_read_only_directory_costs_nothing_but_the_disk(mounted: Mounted, caplog: pytest.LogCaptureFixture) -> None:
    with mounted("size=64k") as state:
        first = _open(state)
        _request(first, None, 0)
        first.stop()
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)
        with caplog.at_level(logging.WARNING):
            profiles = _open(state)
            assert profiles.get("default").tokens == 3
            _request(profiles, None, 0)
            profiles.save()
            assert profiles.put(taught()) is False
            profiles.stop()
        assert caplog.text.count("Read-only file system") == 1
        assert profiles.get("default").tokens == 6
