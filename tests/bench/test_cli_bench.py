from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertd.bench import space
from expertd.bench.prompts import from_file
from expertd.cli import run
from expertd.errors import BenchError, UsageError


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if line.startswith("expertd: ")]
    assert len(lines) == 1
    assert "Traceback" not in text
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ab"], 2, "give a MODEL or --inflate"),
        (["ab", "m.gguf", "--inflate", "1GiB"], 2, "one of the two"),
        (["ab", "m.gguf", "--prompt", "x", "--prompts", "y"], 2, "--prompt or --prompts"),
        (["ab", "absent.gguf"], 1, "absent.gguf"),
        (["ab", "--inflate", "much"], 2, "'much' is not a size"),
        (["ab", "--inflate", "1MB"], 2, "cannot be as small as"),
        (["ab", "m.gguf", "--arm", "fast"], 2, "no arm 'fast'"),
        (["ab", "m.gguf", "--memory", "lots"], 2, "'lots' is not a size"),
        (["ab", "m.gguf", "--report", "/absent/r.html"], 1, "there is no directory /absent"),
        (["geometry"], 2, "give the NAME of a geometry"),
        (["geometry", "gpt-9"], 2, "no geometry gpt-9"),
        (["geometry", "absent.toml"], 1, "cannot read the geometry absent.toml"),
        (["geometry", "olmoe-1b-7b", "--used", "65"], 2, "65 experts used of 64"),
        (["geometry", "olmoe-1b-7b", "--routes", "absent.csv"], 1, "cannot read the trace absent.csv"),
        (["http", "localhost"], 2, "'localhost' is no http URL"),
        (["http", "http://127.0.0.1:9"], 1, "is the server running?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == code
    assert message in _error(capsys)


def test_geometries_are_listed_and_told_before_writing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "geometry", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "qwen3-30b-a3b" in listed
    assert "17.3 GB, 48 layers x 128 experts of 2.65 MB" in listed
    assert run(["bench", "geometry", "qwen3-30b-a3b", "--layers", "2", "--dry-run"]) == 0
    assert "2 layers x 128 experts" in capsys.readouterr().err


def test_there_is_no_room_for_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "geometry", "kimi-k2", "--layers", "6000", "--dir", str(tmp_path)]) == 1
    assert "1 GiB must stay free" in _error(capsys)
    assert not list(tmp_path.iterdir())


def test_files_in_memory_are_refused() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("there is no /dev/shm to try")
    if space.file_system(shm).kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(UsageError, match="its files lie in memory"):
        space.directory(shm / "expertd-bench-test")
    (shm / "expertd-bench-test").rmdir()


def test_prompts_by_topic(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("b", "4"), ("c", "5")]
    path.write_text("\n\n".join(json.dumps({"topic": t, "text": x}) for t, x in rows))
    assert [p.text for p in from_file(path)] == ["1", "2", "5"]
    assert [p.text for p in from_file(path, ("b", "c"))] == ["2", "5"]
    assert [p.text for p in from_file(path, ("a",), 5)] == ["1", "3"]
    with pytest.raises(UsageError, match="no prompt of d"):
        from_file(path, ("d",))
    for bad in ("{", "[1]", '{"topic": "x"}', '{"text": ""}'):
        path.write_text(bad)
        with pytest.raises(UsageError, match="line 1"):
            from_file(path)
    path.write_bytes(b"\xff")
    with pytest.raises(BenchError):
        from_file(path)
