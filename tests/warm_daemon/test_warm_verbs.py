"""warm, profile, rehearse, pin, unpin, evict and trace, as a user types them, on a running daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertd.runtime.trace_file import read_header, read_routes
from tests.warm_daemon.conftest import CHAT, CODE, Daemon

pytestmark = pytest.mark.linux65


def test_a_demo_is_rehearsed_and_its_profile_is_at_hand(daemon: Daemon, tmp_path: Path, model: Path) -> None:
    script = tmp_path / "prompts.txt"
    script.write_text("# the demo\n" + "\n---\n".join(CODE[:2]))
    daemon.run("trace", "start", "--max", "1MiB")
    missed = daemon.run("rehearse", "--script", str(script), "--max-tokens", "6", "--target-tps", "1000000", ok=3)
    assert "targets missed" in missed.stdout
    assert "what would help" in missed.stdout
    daemon.run("trace", "stop")
    script.write_text("\n".join(CHAT[:2]))
    met = daemon.run(
        "rehearse", "--script", str(script), "--max-tokens", "6", "--profile", "chat", "--target-ttft", "10m", "--json"
    )
    assert json.loads(met.stdout)["ok"]
    rows = json.loads(daemon.run("profile", "list", "--json").stdout)["profiles"]
    assert {r["name"] for r in rows} == {"chat", "default", "demo"}
    shown = daemon.run("profile", "show", "demo").stdout
    assert len([line for line in shown.splitlines() if line.strip()[:1].isdigit()]) == 8
    daemon.run("profile", "show", "demo", "--plot", str(tmp_path / "heat.svg"))
    assert b"<svg" in (tmp_path / "heat.svg").read_bytes()[:400]
    daemon.run("profile", "export", "demo", str(tmp_path / "x.profile"))
    assert "--replace" in daemon.run("profile", "import", str(tmp_path / "x.profile"), ok=1).stderr
    daemon.run("profile", "import", str(tmp_path / "x.profile"), "--name", "copy")
    daemon.run("profile", "merge", "copy", "chat", "--into", "both")
    daemon.run("profile", "rename", "copy", "other")
    daemon.run("profile", "delete", "other")
    assert len(json.loads(daemon.run("profile", "diff", "demo", "chat", "--json").stdout)["rows"]) == 3
    warmed = json.loads(daemon.run("warm", str(model), "--profile", "both", "--json").stdout)
    assert warmed["resident_bytes"] == warmed["target_bytes"]
    assert json.loads(daemon.run("pin", "--profile", "both", "--share", "10%", "--json").stdout)["pinned"]["experts"]
    assert json.loads(daemon.run("evict", "--expert", "7:3-9", "--json").stdout)["evicted"]["experts"] >= 0
    assert json.loads(daemon.run("unpin", "--json").stdout)["pinned_total"]["experts"] == 0


def test_what_was_recorded_can_be_read_in_both_forms(daemon: Daemon, tmp_path: Path) -> None:
    binary, columns = tmp_path / "t.trace", tmp_path / "t.csv"
    daemon.run("trace", "export", str(binary))
    daemon.run("trace", "export", "--csv", str(columns))
    with binary.open("rb") as f:
        header = read_header(f, "t")
        routes = list(read_routes(f))
    assert header["experts_used"] == 4
    assert {r.layer for r in routes} == set(range(8))
    rows = [line for line in columns.read_text().splitlines() if line[0].isdigit()]
    assert len(rows) == sum(len(r.ids) for r in routes)


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "show", "../../etc/passwd"),
        ("profile", "show", "nope"),
        ("profile", "import", "/nonexistent"),
        ("profile", "delete", "nope"),
        ("pin", "--expert", "99:1"),
        ("pin",),
        ("evict",),
        ("evict", "--share", "0"),
        ("unpin", "--layers", "5-2"),
        ("warm", "--profile", "nope"),
        ("rehearse", "--script", "/nonexistent"),
        ("trace", "start", "--max", "1"),
    ],
)
def test_bad_input_is_one_line(daemon: Daemon, words: tuple[str, ...]) -> None:
    done = daemon.run(*words, ok=None)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("expertd: ")
    assert done.stderr.count("\n") == 1
