"""Each cause is made to happen to a real daemon, and its verdict names it.

The built-in model with its experts padded to half a gigabyte; real memory limits, a real disk, real processes. The
topic that changes is in `test_topic_live.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expertd.bench import inflate
from expertd.bench.cgroup import MemoryGroup, memory_group
from expertd.bench.pagecache import drop

pytestmark = [pytest.mark.root, pytest.mark.cgroup, pytest.mark.slow]

MODEL_NBYTES = 550 << 20
PROMPTS = (
    "The old house by the river was", "def read_lines(path):", "#include <stdio.h>", "<html><head><title>",
    "El perro corre por la calle y", "2024-05-01 12:00:01 ERROR disk", "What is the capital of France?",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("causes") / "padded.gguf"
    inflate.write(inflate.plan(MODEL_NBYTES), path)
    yield path
    path.unlink()


class Daemon:
    """A running daemon. `work` keeps it busy and returns the verdicts it was heard to give."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def complete(self, prompt: str, tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/expertd/status")["verdict"]
        return found

    def work(
        self, until: str, seconds: float, *, prompts: tuple[str, ...] = PROMPTS, tokens: int = 40
    ) -> dict[str, Any]:
        """Ask until a verdict has this cause; the last one otherwise."""
        end, turn = time.monotonic() + seconds, 0
        while True:
            self.complete(prompts[turn % len(prompts)], tokens)
            turn += 1
            found = self.verdict()
            if found["cause"] == until or time.monotonic() > end:
                return found


@contextmanager
def daemon(
    model: Path, tmp_path: Path, *options: str, group: MemoryGroup | None = None, joins: Path | None = None
) -> Iterator[Daemon]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    # Ahead of whatever else runs here, so that the cause is the one that is made and not the machine's other work.
    command = [
        "nice",
        "-n",
        "-15",
        sys.executable,
        "-m",
        "expertd",
        "serve",
        "--model",
        str(model),
        "--port",
        str(port),
        "--ctx",
        "1024",
        "--threads",
        "1",
    ]
    command += ["--set", "server.socket=", "--set", f"state.directory={tmp_path}", *options]
    if joins is not None:
        command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(joins), *command]
    environment = os.environ | {"EXPERTD_CONFIG": os.devnull}
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            group.command(command) if group else command, stdout=log, stderr=log, env=environment
        )
    found = Daemon(port)
    try:
        for _ in range(900):
            try:
                found.get("/readyz")
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def expect(found: dict[str, Any], cause: str) -> None:
    """The verdict names the cause, unless the machine's other work is a stronger one and is named instead."""
    if found["cause"] == "contention" or (found["cause"] == "disk" and cause == "memory"):
        pytest.skip(f"this machine is too busy to show it: {found['sentence']}")
    assert found["cause"] == cause, found


def test_a_budget_that_is_too_small(model: Path, tmp_path: Path) -> None:
    drop([model])
    with daemon(model, tmp_path, "--steering", "on", "--budget", "15%") as d:
        found = d.work("memory", 25)
    expect(found, "memory")
    assert found["figures"]["hit_ratio"] < 0.9


@pytest.fixture
def slow_disk(model: Path) -> Iterator[Path]:
    """The process list of a group whose reads of the model's disk are held to 60 MB/s: the cold phase of a model this
    small would else be over before a window is."""
    group = Path("/sys/fs/cgroup/blkio") / f"expertd-test-{os.getpid()}"
    device = model.stat().st_dev
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a writable blkio cgroup (v1): {error.strerror}")
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {60 * 10**6}"
        try:
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"this disk cannot be throttled: {error.strerror}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def test_a_cold_cache(model: Path, tmp_path: Path, slow_disk: Path) -> None:
    drop([model])
    with daemon(model, tmp_path, "--steering", "on", "--budget", "100%", joins=slow_disk) as d:
        found = d.work("cold", 25, tokens=24)
        expect(found, "cold")
        assert "filled" in found["sentence"]


def test_long_prompts(model: Path, tmp_path: Path) -> None:
    long = " ".join(PROMPTS * 12)
    with daemon(model, tmp_path, "--steering", "on", "--budget", "100%") as d:
        found = d.work("prompt", 25, prompts=(long,), tokens=1)
    expect(found, "prompt")


def test_a_memory_hog_beside_it(model: Path, tmp_path: Path) -> None:
    hog = "import sys, time; b = bytearray(int(sys.argv[1])); b[::4096] = bytes(len(b[::4096])); time.sleep(120)"
    with memory_group(700 << 20) as group, daemon(model, tmp_path, "--steering", "on", group=group) as d:
        before = d.get("/expertd/cache")["budget_bytes"]
        d.work("compute", 15)
        process = subprocess.Popen(group.command([sys.executable, "-c", hog, str(430 << 20)]))
        try:
            found = d.work("pressure", 40)
        finally:
            process.kill()
            process.wait()
        after = d.get("/expertd/cache")["budget_bytes"]
    assert found["cause"] == "pressure", (found, before, after)
    assert "another process" in found["sentence"]


@pytest.fixture
def loop_disk(model: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A copy of the model on a disk of its own, and the file that sets that disk's read-ahead."""
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(MODEL_NBYTES + (96 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    # Past the page cache of the disk below where that can be, so that a read costs what a disk costs.
    for direct in ("on", "off"):
        command = ["losetup", "--find", "--show", f"--direct-io={direct}", str(image)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"needs loop devices: {done.stderr.strip()}")
    loop = done.stdout.strip()
    try:
        subprocess.run(["mount", loop, str(mount)], check=True)
        copy = mount / model.name
        subprocess.run(["cp", str(model), str(copy)], check=True)
        drop([copy])
        device = copy.stat().st_dev
        yield copy, Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    finally:
        subprocess.run(["umount", str(mount)], check=False)
        subprocess.run(["losetup", "--detach", loop], check=True)
        image.unlink()


def test_a_disk_that_reads_far_ahead(loop_disk: tuple[Path, Path], tmp_path: Path) -> None:
    model, read_ahead = loop_disk
    read_ahead.write_text("8192")
    with memory_group(300 << 20) as group, daemon(model, tmp_path, "--steering", "off", group=group) as d:
        found = d.work("read_ahead", 60, tokens=8)
    expect(found, "read_ahead")
    assert "8192 KiB" in found["sentence"]
