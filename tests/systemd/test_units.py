"""The shipped units, without a running systemd: they verify, their sandbox scores, they fit the code.

That they work is shown by `nspawn.py`, which boots a systemd.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertd.config.paths import SYSTEM_FILE, SYSTEM_SOCKET

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "systemd"
UNITS = ("expertd.service", "expertd@.service", "expertd-warm@.service")
INSTANCES = {"expertd@.service": "expertd@big.service", "expertd-warm@.service": "expertd-warm@srv-big.gguf.service"}
DROP_INS = sorted(p.name for p in (SHIPPED / "drop-ins").glob("*.conf"))


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """A unit directory with the shipped units, whose executable exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian's package systemd)")
    for name in UNITS:
        text = (SHIPPED / name).read_text().replace("/usr/local/bin/expertd", sys.executable)
        (tmp_path / name).write_text(text)
    return tmp_path


def analyze(units: Path, *arguments: str) -> str:
    env = os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"}
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def score(units: Path, name: str) -> float:
    found = re.search(
        r"exposure level for \S+: ([\d.]+)", analyze(units, "security", "--offline=true", str(units / name))
    )
    assert found
    return float(found[1])


@pytest.mark.parametrize("name", UNITS)
def test_units_verify_without_a_word(units: Path, name: str) -> None:
    instance = INSTANCES.get(name, name)
    if instance != name:
        (units / instance).symlink_to(units / name)
    assert analyze(units, "verify", str(units / instance)) == ""


@pytest.mark.parametrize("name", UNITS)
def test_the_sandbox_is_tight(units: Path, name: str) -> None:
    assert score(units, name) <= 2.0


@pytest.mark.parametrize("drop_in", DROP_INS)
def test_drop_ins_verify_and_keep_the_sandbox(units: Path, drop_in: str) -> None:
    directory = units / "expertd.service.d"
    directory.mkdir()
    shutil.copy(SHIPPED / "drop-ins" / drop_in, directory)
    assert analyze(units, "verify", str(units / "expertd.service")) == ""
    assert score(units, "expertd.service") <= 2.0


def settings(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([A-Za-z]+)=(.*)$", (SHIPPED / name).read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def test_what_steering_needs_is_left_open() -> None:
    for name in UNITS:
        unit = settings(name)
        assert unit["LimitMEMLOCK"] == ["infinity"]
        assert "mincore cachestat" in unit["SystemCallFilter"][0]
        assert "MemoryMax" not in unit
        assert "ProcSubset" not in unit, "/proc/meminfo and /proc/pressure are read"
    assert not any("@resources" in f for f in settings("expertd.service")["SystemCallFilter"])


def test_the_template_differs_from_the_unit_only_in_names() -> None:
    one, many = settings("expertd.service"), settings("expertd@.service")
    differ = {key for key in one.keys() | many.keys() if one.get(key) != many.get(key)}
    assert differ == {"Description", "ExecStart", "StateDirectory", "RuntimeDirectory", "LoadCredential"}


def test_directories_are_those_that_the_configuration_looks_in() -> None:
    unit = settings("expertd.service")
    assert SYSTEM_FILE.parent == Path("/etc") / unit["ConfigurationDirectory"][0]
    assert SYSTEM_SOCKET.parent == Path("/run") / unit["RuntimeDirectory"][0]
    assert unit["RestartPreventExitStatus"] == ["2"]


def make(target: str, **variables: Path) -> str:
    arguments = ["make", "-s", "-f", "config/install.mk", target, *(f"{k}={v}" for k, v in variables.items())]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_lays_files_and_uninstall_takes_them_but_not_the_configuration(tmp_path: Path) -> None:
    if Path("/run/systemd/system").is_dir():
        pytest.skip("would stop a real expertd.service on this machine")
    prefix, etc = tmp_path / "opt", tmp_path / "etc"
    make("install-files", PREFIX=prefix, SYSCONFDIR=etc)
    laid = prefix / "lib" / "systemd" / "system"
    assert sorted(p.name for p in laid.iterdir()) == sorted(UNITS)
    for name in UNITS:
        assert f"ExecStart={prefix}/bin/expertd " in (laid / name).read_text()
    assert (prefix / "lib" / "sysusers.d" / "expertd.conf").is_file()
    own = etc / "expertd" / "expertd.toml"
    own.write_text("[server]\nport = 1\n")
    make("install-files", PREFIX=prefix, SYSCONFDIR=etc)
    assert own.read_text() == "[server]\nport = 1\n"
    make("uninstall-files", PREFIX=prefix, SYSCONFDIR=etc)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [own]
