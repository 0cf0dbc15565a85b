"""Bad input gets one line that names what, where and what to do next; no traceback, a stable exit code."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.daemon.conftest import arguments, daemon, environment


def _serve(model: Path, directory: Path, *more: str) -> tuple[int, str]:
    """(exit code, what was said on standard error)."""
    done = subprocess.run(
        arguments(model, directory, *more), capture_output=True, text=True, timeout=60, check=False,
        env=environment(directory), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def _dense_model(path: Path) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_no_such_file(tmp_path: Path) -> None:
    code, said = _serve(tmp_path / "none.gguf", tmp_path)
    assert code == 1
    assert "none.gguf" in said


def test_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is no model, but it is long enough to be looked at")
    code, said = _serve(tmp_path / "text.gguf", tmp_path)
    assert code == 1
    assert "text.gguf" in said


def test_a_dense_model(tmp_path: Path) -> None:
    code, said = _serve(_dense_model(tmp_path / "dense.gguf"), tmp_path)
    assert code == 1
    assert "no experts" in said
    assert "--steering off" in said


def test_an_unknown_key(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "expertd.toml"
    file.write_text("[cache]\nbuget = '1GiB'\n")
    code, said = _serve(demo_model, tmp_path, "--config", str(file))
    assert code == 2
    assert f"{file}:2: cache.buget: unknown key" in said
    assert "cache.budget" in said
    assert len(said.splitlines()) == 1


def test_a_value_out_of_its_limits(demo_model: Path, tmp_path: Path) -> None:
    code, said = _serve(demo_model, tmp_path, "--set", "server.port=70000")
    assert code == 2
    assert "server.port" in said
    assert len(said.splitlines()) == 1


def test_a_port_in_use(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = _serve(demo_model, tmp_path, "--port", str(port))
    assert code == 1
    assert f"127.0.0.1:{port} is in use" in said
    assert len(said.splitlines()) == 1


def test_a_second_daemon_on_the_same_socket(demo_model: Path, tmp_path: Path) -> None:
    with daemon(demo_model, tmp_path):
        code, said = _serve(demo_model, tmp_path)
    assert code == 1
    assert "admin.sock" in said


def test_a_budget_below_one_tokens_need(demo_model: Path, tmp_path: Path) -> None:
    code, said = _serve(demo_model, tmp_path, "--budget", "100KiB")
    assert code != 0
    assert "one token needs" in said
    assert "--budget 1MiB" in said


@pytest.mark.parametrize("flag", [("--budget", "much"), ("--steering", "maybe"), ("--set", "nothing"), ("--nope",)])
def test_a_flag_that_is_off(demo_model: Path, tmp_path: Path, flag: tuple[str, ...]) -> None:
    code, said = _serve(demo_model, tmp_path, *flag)
    assert code == 2
    assert len(said.splitlines()) == 1


def test_a_verb_without_a_daemon(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "expertd", "status", "--socket", str(tmp_path / "none.sock")],
        capture_output=True, text=True, check=False, timeout=30, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 3
    assert "none.sock" in done.stderr
    assert len(done.stderr.splitlines()) == 1
