"""The model file changes in the middle of an answer, or under a daemon that does not steer: noticed, told, ended."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import pytest

from tests.daemon.conftest import RunningDaemon, daemon

BODY = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(demo_model: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.gguf"
    shutil.copy(demo_model, copy)
    return copy


def _one_error(running: RunningDaemon, words: str) -> None:
    assert running.process.wait(30) == 1
    errors = [line for line in running.log.splitlines() if " ERROR " in line]
    assert len(errors) == 1, running.log
    assert words in errors[0]
    assert "Traceback" not in running.log


def test_a_file_that_is_overwritten_in_place_ends_the_answer_with_an_error(model: Path, tmp_path: Path) -> None:
    size = model.stat().st_size
    codes, finished, events = [], False, 0
    with daemon(model, tmp_path, "--threads", "1") as running:
        with running.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                events += 1
                if events == 3:
                    with model.open("r+b") as f:
                        f.seek(size // 2)
                        f.write(bytes(size // 4))
                if "error" in event:
                    codes.append(event["error"]["code"])
                finished = finished or any(c["finish_reason"] for c in event.get("choices", ()))
        assert codes == ["model_changed"]
        assert not finished
        _one_error(running, f"{model} was rewritten in place while it was in use")


def _replace(model: Path) -> None:
    other = model.with_suffix(".new")
    shutil.copy(model, other)
    os.replace(other, model)


def test_a_daemon_that_does_not_steer_notices_at_the_next_request(model: Path, tmp_path: Path) -> None:
    with daemon(model, tmp_path, "--threads", "1", "--steering", "off") as running:
        short = {**BODY, "max_tokens": 5}
        assert running.http.post("/v1/completions", json=short).status_code == 200
        _replace(model)
        refused: httpx.Response = running.http.post("/v1/completions", json=short)
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "model_changed"
        _one_error(running, f"{model} was replaced by another file while it was in use")
