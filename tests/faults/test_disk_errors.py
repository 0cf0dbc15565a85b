"""The disk gives an input/output error: no wrong answer, one line that names the file, an end by rule."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from expertd.errors import ModelReadError
from expertd.model.expertmap import build_map
from expertd.model.gguf import read_model
from expertd.pages import libc, ranges
from expertd.pages.mapping import MappedFiles
from expertd.pages.pager import Pager
from tests.daemon.conftest import RunningDaemon, daemon, environment
from tests.faults.fuse_disk import Disk

pytestmark = pytest.mark.root

BODY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
Words = Callable[[Disk], str]


@pytest.fixture
def last_experts(demo_model: Path) -> tuple[int, int]:
    """Whole pages of some experts of the last layer that nothing reads before a token needs them: the fingerprint
    samples the middle of a tensor."""
    layer = build_map(read_model(demo_model)).layout().layers[-1]
    tensor = layer.tensors[0]
    eighth = tensor.stride * layer.n_experts // 8
    return ranges.owned(tensor.offset + eighth, tensor.offset + 3 * eighth, libc.PAGE)


def _errors(running: RunningDaemon) -> list[str]:
    return [line for line in running.log.splitlines() if " ERROR " in line]


def _streamed(http: httpx.Client) -> Iterator[dict[str, object]]:
    """The events of a streamed answer, or the one error."""
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith(("data: {", "{")):
                yield json.loads(line.removeprefix("data: "))


def test_an_error_in_a_decode_fails_the_request_and_ends_the_daemon(
    disk: Disk, tmp_path: Path, last_experts: tuple[int, int]
) -> None:
    with daemon(disk.path, tmp_path) as running:
        whole = running.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert running.admin.post("/expertd/evict", json={"all": True}).status_code == 200
        disk.fail(*last_experts)
        events = list(_streamed(running.http))
        assert [e["error"]["code"] for e in events if "error" in e] == ["model_unreadable"]  # type: ignore[index]
        text = "".join(e["choices"][0]["text"] for e in events if e.get("choices"))  # type: ignore[index]
        assert whole.startswith(text)
        assert running.process.wait(30) == 1
        errors = _errors(running)
        assert len(errors) == 1, running.log
        assert f"{disk.path} cannot be read at byte" in errors[0]
        assert "Traceback" not in running.log
        assert list(tmp_path.glob("profiles/*/default.profile"))
    disk.heal()
    with daemon(disk.path, tmp_path) as running:
        assert running.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == whole


@pytest.mark.parametrize("steering", ["on", "off"])
def test_an_error_at_the_load_is_told_in_one_line(disk: Disk, tmp_path: Path, steering: str) -> None:
    layout = build_map(read_model(disk.path)).layout()
    part = max(layout.dense, key=lambda e: e.nbytes)
    # Past what the header's reading took along.
    disk.fail(part.end - 3 * libc.PAGE, part.end - libc.PAGE)
    with daemon(disk.path, tmp_path, "--steering", steering, ready=False) as running:
        assert running.process.wait(60) == 1
        errors = _errors(running)
        assert len(errors) == 1, running.log
        assert str(disk.path) in errors[0]
        assert "nput/output error" in errors[0]
        assert "Traceback" not in running.log


def test_a_header_that_cannot_be_read_is_told_in_one_line(disk: Disk, tmp_path: Path) -> None:
    disk.fail(0, 4096)
    done = _expertd(tmp_path, "inspect", str(disk.path))
    assert done.returncode == 1
    assert done.stderr.strip() == f"expertd: {disk.path}: input/output error; check the path"


@pytest.mark.parametrize("options", [(), ("--pin",)])
def test_warm_names_the_byte_and_fails(
    disk: Disk, tmp_path: Path, last_experts: tuple[int, int], options: tuple[str, ...]
) -> None:
    bad = last_experts[0] + 8 * libc.PAGE
    disk.fail(bad, bad + libc.PAGE)
    done = _expertd(tmp_path, "warm", str(disk.path), "--local", "--all", *options)
    assert done.returncode == 1
    assert f"{disk.path} cannot be read at byte {bad}: input/output error" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_warm_up_of_the_daemon_goes_on_without_what_cannot_be_read(
    disk: Disk, tmp_path: Path, last_experts: tuple[int, int]
) -> None:
    disk.fail(*last_experts)
    with daemon(
        disk.path, tmp_path, "--warm", "all", "--set", "warm.ready_requires=warm", "--budget", "100%"
    ) as running:
        assert f"warm job failed: {disk.path} cannot be read at byte" in running.log
        assert running.http.get("/health").status_code == 200
        assert running.stop() == 0


def test_locking_what_cannot_be_read_returns(disk: Disk, last_experts: tuple[int, int]) -> None:
    """mlock alone would not."""
    layout = build_map(read_model(disk.path)).layout()
    disk.fail(*last_experts)
    with MappedFiles.map(layout.files) as mapping:
        pager = Pager(layout, mapping)
        expert = layout.layers[-1].layer * layout.n_experts + layout.n_experts // 4
        assert pager.pin([expert]) == []
        with pytest.raises(ModelReadError, match="cannot be read at byte"):
            pager.wait([expert])
        pager.close()


def _expertd(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "expertd", *arguments], capture_output=True, text=True, timeout=120, check=False,
        env=environment(home),
    )  # fmt: skip
