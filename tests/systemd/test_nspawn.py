"""The shipped units under a real systemd: runs `nspawn.py`, whose lines say what is checked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Kept between runs on one machine: making it takes a minute or two, the checks a minute and a half.
ROOT = Path("/var/cache/expertd-test/bookworm")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_services_life_under_systemd() -> None:
    for tool, package in (("debootstrap", "debootstrap"), ("systemd-nspawn", "systemd-container")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian's package {package})")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("needs Python 3.11, that of the container (Debian 12), for the compiled packages")
    done = subprocess.run(
        [sys.executable, "-m", "tests.systemd.nspawn", "--root", str(ROOT)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok"))
