"""`expertd replay` as a user types it."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from expertd.cache.replay import policy_names
from expertd.cli import run

CHAT = Path(__file__).parent / "data" / "chat.trace"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["replay", str(CHAT), *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "--policy", "lru,lfru,belady", "--budget", "10%,1MiB", "--disk-speed", "1MB/s")
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [(r["policy"], r["budget_bytes"]) for r in rows] == [
        (p, b) for p in ("lru", "lfru", "belady") for b in (707789, 1 << 20)
    ]
    for r in rows:
        assert {"policy", "budget_bytes", "requests", "hits", "hit_ratio", "bytes_read"} <= set(r)
        assert r["hit_ratio"] == r["hits"] / r["requests"]
        assert r["read_seconds"] == r["bytes_read"] / 1e6
        assert "layers" not in r
    assert report["phase"] == "decode"
    assert report["expert_bytes"] == 8 * 64 * 13824
    assert "skew" not in report


def test_layers_and_skew(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "--policy", "lru,belady", "--budget", "25%", "--layers", "--skew", "--phase", "all")
    for r in report["rows"]:  # type: ignore[attr-defined]
        assert [x["layer"] for x in r["layers"]] == list(range(8))
        assert sum(x["requests"] for x in r["layers"]) == r["requests"]
        assert sum(x["hits"] for x in r["layers"]) == r["hits"]
    skew = report["skew"]
    assert isinstance(skew, dict)
    assert set(skew["taken"]) == {"10%", "25%", "50%"}
    assert len(skew["layers"]) == 8
    assert isinstance(skew["helps"], bool)


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(CHAT), "--policy", "all", "--budget", "10%", "--layers", "--skew"]) == 0
    out = capsys.readouterr().out
    for word in (*policy_names(), "8 layers x 64 experts, 4 used", "hit ratio", "10 % last", "layer 7", "routing is"):
        assert word in out


def test_columns_give_what_the_binary_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from expertd.runtime.trace_file import csv_lines, read_header, read_routes

    columns = tmp_path / "chat.csv"
    with CHAT.open("rb") as file:
        columns.write_text("\n".join(csv_lines(read_header(file, "chat"), read_routes(file))) + "\n")
    expected = _json(capsys, "--budget", "10%,50%")
    assert run(["replay", str(columns), "--budget", "10%,50%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == expected["rows"]


def test_a_plot_has_the_roof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.svg"
    assert run(["replay", str(CHAT), "--policy", "lru", "--budget", "10%,50%", "--plot", str(path)]) == 0
    assert "wrote" in capsys.readouterr().err
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    for word in ("lru", "belady", "hit ratio", "budget, % of the experts"):
        assert word in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "clairvoyant"], "known are auto"),
        (["--policy", ","], "names none"),
        (["--budget", "ten%"], "write percent or a size"),
        (["--budget", "inf%"], "write percent or a size"),
        (["--budget", "0%"], "a budget of 0% is none"),
        (["--budget", "-5%"], "is none"),
        (["--budget", ""], "is not a size"),
        (["--disk-speed", "fast"], "is not a size"),
        (["--disk-speed", "0"], "is none"),
        (["--plot", "out.png"], "only .svg"),
        (["--phase", "both"], "both"),
    ],
)
def test_usage_is_told_in_a_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(CHAT), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_matplotlib_nothing_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(["replay", str(CHAT), "--plot", str(tmp_path / "out.svg")]) == 2
    assert "a plot needs matplotlib; pip install 'expertd[plots]'" in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    assert run(["replay", str(path)]) == 1
    path.write_text("turn,phase,step,layer,expert,expert_bytes\n0,0,0,0,3,10\n")
    assert run(["replay", str(path)]) == 2
    assert "has no routes of phase decode; give --phase all" in capsys.readouterr().err
    assert run(["replay", str(path), "--phase", "all"]) == 0
