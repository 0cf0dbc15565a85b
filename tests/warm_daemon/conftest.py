"""Services with a state directory on a model whose pages nobody else holds, and a daemon with its verbs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertd.bench import pagecache
from expertd.engine.settings import EngineSettings
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings

Serve = Callable[..., AbstractAsyncContextManager[Service]]

CODE = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\ndef main",
    "class Tree:\n    def __init__(self, value, left=None):\n        self.value = value\n        self.left = left",
    "import os\nimport sys\n\nfor name in os.listdir(sys.argv[1]):\n    path = os.path.join(sys.argv[1], name)\n",
    "def read_lines(path):\n    with open(path) as f:\n        return [line.strip() for line in f if line]\n\ndef",
)
CHAT = (
    "The old woman walked slowly along the road to the village, and the children ran before her in the snow.",
    "He had never seen such a house. The windows were high and the doors were made of dark and heavy wood, and",
    "It was a quiet evening in the month of May, and the sun had gone down behind the hills when she said that",
    "My dear friend, I am very glad to hear that you are well again, and that your mother will come to see us",
)
"""Two topics; the last of each is not taught but asked."""


@pytest.fixture(scope="session")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "own.gguf"
    shutil.copyfile(demo_model, path)
    path.chmod(0o644)
    return path


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Serve:
    """`async with serve(budget_share=0.5) as service`, from a cold page cache; waits until it is no longer loading."""

    @asynccontextmanager
    async def started(*, wait: str = "ready", **settings: object) -> AsyncIterator[Service]:
        pagecache.drop([model])
        settings.setdefault("state", tmp_path / "state")
        engine = EngineSettings(model, n_ctx=512, n_ubatch=64, threads=1, threads_batch=1)
        service = Service(RuntimeSettings(engine, steering="on", **settings))  # type: ignore[arg-type]
        service.start()
        while service.state not in (wait, "failed"):
            await service.wait_changed()
        assert service.state == wait, service.failure
        try:
            yield service
        finally:
            assert await service.stop()

    return started


@dataclass
class Daemon:
    """A running daemon and its command line."""

    state: Path
    process: subprocess.Popen[bytes]

    def run(self, *words: str, ok: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "expertd", *words, "--socket", str(self.state / "admin.sock")],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if ok is not None:
            assert done.returncode == ok, done.stderr + done.stdout
        return done


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state = tmp_path_factory.mktemp("state")
    words = [
        "serve", "--model", str(model), "--steering", "on", "--budget", "40%", "--port", "0", "--ctx", "512",
        "--threads", "1", "--socket", str(state / "admin.sock"), "--set", f"state.directory={state}",
    ]  # fmt: skip
    with (state / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "expertd", *words], stdout=log, stderr=log)
    made = Daemon(state, process)
    end = time.monotonic() + 120
    while made.run("status", ok=None).returncode:
        assert process.poll() is None, (state / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.2)
    yield made
    process.terminate()
    assert process.wait(30) == 0, (state / "log").read_text()
    assert os.listdir(state / "profiles")
