"""The model file changes under the daemon: it says so in one line and ends, instead of dying or answering wrongly."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import httpx
import pytest

from tests.daemon.conftest import daemon


def _copy(model: Path, directory: Path) -> Path:
    copy = directory / "model.gguf"
    shutil.copy(model, copy)
    return copy


def _ask(http: httpx.Client) -> int:
    """The status of an answer, 0 where the connection broke."""
    try:
        return http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 200}).status_code
    except httpx.TransportError:
        return 0


def _cut(model: Path) -> None:
    os.truncate(model, model.stat().st_size // 3)


def _replace(model: Path) -> None:
    other = model.with_suffix(".new")
    shutil.copy(model, other)
    os.replace(other, model)


@pytest.mark.parametrize(("change", "words"), [(_cut, "was cut"), (_replace, "was replaced")])
def test_a_model_that_is_cut_or_replaced_is_noticed_and_named(
    demo_model: Path, tmp_path: Path, change: object, words: str
) -> None:
    model = _copy(demo_model, tmp_path)
    with daemon(model, tmp_path) as running:
        assert _ask(running.http) == 200
        change(model)  # type: ignore[operator]
        end = time.monotonic() + 20
        while running.process.poll() is None and time.monotonic() < end:
            _ask(running.http)
            time.sleep(0.1)
        assert running.process.wait(20) == 1
        assert str(model) in running.log
        assert words in running.log
        assert len([line for line in running.log.splitlines() if " ERROR " in line]) == 1
        assert "Traceback" not in running.log
