"""A minimal Debian 12 with a real systemd, booted in a container. Needs root, Linux namespaces, and Debian's packages
debootstrap and systemd-container. This checkout, and wheels of what it needs, are mounted into it read-only."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = "systemd,systemd-sysv,dbus,procps,libgomp1,libstdc++6,make,python3,python3-venv"
# nspawn forbids locking memory and looking into the page cache, which a machine's own systemd does not.
CALLS = ["--system-call-filter=@memlock mincore cachestat"]
SOURCE, WHEELS = "/opt/expertd/source", "/opt/expertd/wheels"
MARKER = "etc/expertd-test-1"
"""In a root that is made; another number where roots of before do not do."""
ENVIRONMENT = [
    "env",
    "--ignore-environment",
    "HOME=/root",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
]


class Failed(Exception):
    """Something does not hold; the message says what was found."""


class Container:
    """A booted container. `run` executes in it."""

    def __init__(self, root: Path, wheels: Path) -> None:
        self._log = (root.parent / "console.log").open("wb")
        command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", f"--directory={root}"]
        binds = [f"--bind-ro={REPO}:{SOURCE}", f"--bind-ro={wheels}:{WHEELS}"]
        self._nspawn = subprocess.Popen(
            [*command, *binds, *CALLS, "--console=pipe"], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._leader = 0
        wait_for("the container's first process", self._find_leader, 30)
        wait_for("the end of the boot", self._booted, 60)

    def _find_leader(self) -> bool:
        if self._nspawn.poll() is not None:
            raise Failed(f"systemd-nspawn ended: {Path(self._log.name).read_text(errors='replace')[-500:]}")
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        self._leader = int(children[0]) if children else 0
        return bool(children)

    def _booted(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).strip() in ("running", "degraded")

    def run(self, *command: str, check: bool = True, stdin: str = "") -> str:
        """What a command printed to both streams."""
        inside = ["nsenter", f"--target={self._leader}", "--all", "--root", "--wd", "--", *ENVIRONMENT, *command]
        done = subprocess.run(
            inside, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
        )
        if check and done.returncode:
            raise Failed(f"{' '.join(command)}: {done.stdout.strip()[-400:]}")
        return done.stdout

    def show(self, unit: str, *names: str) -> list[str]:
        """Properties of a unit."""
        return [self.run("systemctl", "show", "--value", f"--property={name}", unit).strip() for name in names]

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--quiet", "--no-pager", "--output=short-monotonic", "--boot", f"--unit={unit}")

    def stop(self) -> None:
        """Powers it off."""
        self.run("systemctl", "poweroff", check=False)
        try:
            self._nspawn.wait(20)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
        self._log.close()


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.2)


def expect(condition: bool, found: object) -> None:
    if not condition:
        raise Failed(f"found {found!r}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def make_root(root: Path) -> None:
    """A minimal Debian, once. Failed for a directory that is something else: the test removes files in it."""
    marker = root / MARKER
    if not marker.exists():
        if root.exists() and any(root.iterdir()):
            raise Failed(f"{root} was not made by this version of the test, or not to its end: remove it")
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise Failed(f"debootstrap: {done.stdout[-400:]}")
        marker.touch()
