"""Boots a real systemd in a container and puts the shipped units through a service's life.

    python -m tests.systemd.nspawn [--root DIRECTORY]

Needs root, Linux namespaces, and Debian's packages debootstrap and systemd-container. The container is a minimal Debian
12 made in DIRECTORY (a temporary one without the option, which is removed afterwards); `make install` installs this
checkout in it, with wheels of the packages that it runs with here. One line is printed for each thing that is checked;
exits 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.systemd.container import REPO, SOURCE, WHEELS, Container, Failed, expect, free_port, make_root, wait_for
from tests.systemd.wheels import pack_all

API_KEY, ADMIN_KEY = "an-api-key-of-the-test", "an-admin-key-of-the-test"
OFFLINE = [
    "env",
    "PIP_NO_INDEX=1",
    f"PIP_FIND_LINKS={WHEELS}",
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
    "PIP_ROOT_USER_ACTION=ignore",
]
MAKE = [*OFFLINE, "make", "--no-print-directory", "-C", SOURCE]


def prepare(root: Path) -> None:
    """A model, and nothing that an earlier run left."""
    for leftover in ("etc/systemd/system/expertd.service.d", "var/lib/private", "var/lib/expertd", "var/log/journal"):
        path = root / leftover
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    for leftover in ("etc/credstore", "etc/expertd", "usr/local"):
        shutil.rmtree(root / leftover, ignore_errors=True)
    (root / "etc/credstore").mkdir(mode=0o700)
    model = root / "srv/models/tiny.gguf"
    model.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(REPO / "expertd/data/tiny-moe-q4_0.gguf", model)
    model.chmod(0o644)


def drop_in(root: Path, name: str, text: str) -> None:
    directory = root / "etc/systemd/system/expertd.service.d"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.conf").write_text(text)


def files(root: Path) -> set[str]:
    """What lies where an installation may put something."""
    return {
        str(path.relative_to(root))
        for top in ("etc", "srv", "usr", "var/lib")
        for path in (root / top).rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


class Life:
    """The checks, in order. Each method is one; its docstring is what is printed."""

    def __init__(self, root: Path, container: Container) -> None:
        self.root, self.box = root, container
        self.port = free_port()
        self.pid = ""
        self.before = files(root)
        """What was there before the installation."""

    def configure(
        self, name: str = "expertd", *, port: int | None = None, extra: str = "", level: str = "info"
    ) -> None:
        text = f"""
[model]
path = "/srv/models/tiny.gguf"
[engine]
n_ctx = 512
threads = 1
[cache]
steering = "on"
budget = "3MiB"
[warm]
ready_requires = "warm"
[server]
port = {port or self.port}
[log]
level = "{level}"
{extra}
"""
        (self.root / "etc/expertd" / f"{name}.toml").write_text(text)

    def get(self, path: str, *headers: str, body: str = "", port: int | None = None) -> tuple[int, str]:
        """(status, body) of a request from outside the container, which shares the loopback; status 0 without one."""
        given = dict(header.split(": ", 1) for header in headers)
        if body:
            given["Content-Type"] = "application/json"
        url = f"http://127.0.0.1:{port or self.port}{path}"
        request = urllib.request.Request(url, body.encode() if body else None, given)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def main_pid(self, unit: str = "expertd") -> str:
        return self.box.show(unit, "MainPID")[0]

    def status_field(self, name: str) -> str:
        text = self.box.run("cat", f"/proc/{self.main_pid()}/status")
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(f"{name}:"))

    def is_installed_by_make(self) -> None:
        """make install builds the package and lays it, the units, the group and the configuration"""
        said = self.box.run(*MAKE, "install")
        expect("systemctl enable --now expertd" in said and "WARNING" not in said, said)
        expect("expertd" in self.box.run("expertd", "version"), "version")
        expect("expertd-admin" in self.box.run("getent", "group", "expertd-admin"), "group")
        self.box.run("expertd", "config", "check")
        for unit in ("expertd.service", "expertd@.service", "expertd-warm@.service"):
            expect(unit in self.box.run("systemctl", "list-unit-files", unit), unit)
        # The shipped 30 s would make the test long; nothing else of the unit is changed.
        drop_in(self.root, "watchdog", "[Service]\nWatchdogSec=4\n")

    def starts_and_is_ready_when_start_returns(self) -> None:
        """systemctl start returns when the daemon is ready, and not before"""
        self.configure()
        self.box.run("systemctl", "daemon-reload")
        self.box.run("systemctl", "start", "expertd")
        expect(self.get("/readyz")[0] == 200, self.get("/readyz"))
        expect(self.box.show("expertd", "ActiveState", "SubState") == ["active", "running"], "state")
        self.pid = self.main_pid()

    def says_its_status(self) -> None:
        """systemctl status shows what the daemon does"""
        (text,) = self.box.show("expertd", "StatusText")
        expect(text.startswith("ready"), text)

    def runs_as_a_dynamic_user_without_capabilities(self) -> None:
        """an unprivileged dynamic user without capabilities runs it"""
        uid = int(self.status_field("Uid").split()[0])
        expect(61184 <= uid <= 65519, uid)
        expect(int(self.status_field("CapEff"), 16) == 0, self.status_field("CapEff"))
        expect(self.status_field("NoNewPrivs") == "1" and self.status_field("Seccomp") == "2", "sandbox")

    def pins_the_dense_weights(self) -> None:
        """dense weights are locked although the user has no privilege"""
        locked = int(self.status_field("VmLck").split()[0]) * 1024
        metric = next(line for line in self.get("/metrics")[1].splitlines() if line.startswith("expertd_locked_bytes"))
        expect(locked > 1 << 20 and abs(float(metric.split()[1]) - locked) < 1 << 16, (locked, metric))

    def answers_and_steers(self) -> None:
        """it answers inside the sandbox, and steers"""
        body = json.dumps({"prompt": "The", "max_tokens": 24, "temperature": 0, "ignore_eos": True})
        status, text = self.get("/v1/completions", body=body)
        expect(status == 200 and json.loads(text)["usage"]["completion_tokens"] == 24, text)
        report = json.loads(self.get("/expertd/cache")[1])
        expect(report["steering"] and report["requests"] > 0 and report["misses"] > 0, report)
        expect(report["resident_bytes"] <= report["budget_bytes"], report)

    def opens_the_socket_to_its_group_alone(self) -> None:
        """the admin socket is open to root and to the group expertd-admin, and to nobody else"""
        self.box.run("expertd", "status")
        self.box.run("useradd", "--groups", "expertd-admin", "member", check=False)
        self.box.run("useradd", "stranger", check=False)
        self.box.run("runuser", "-u", "member", "--", "expertd", "status", "--socket", "/run/expertd/admin.sock")
        text = self.box.run(
            "runuser", "-u", "stranger", "--", "expertd", "status", "--socket", "/run/expertd/admin.sock", check=False
        )
        expect("state" not in text.split() and text.count("\n") == 1, text)

    def reloads(self) -> None:
        """a reload applies what it can and names what needs a restart"""
        self.configure(level="debug", extra="[profile]\nname = 'other'\n")
        self.box.run("systemctl", "reload", "expertd")
        wait_for("the reload", lambda: "reloaded: log.level" in self.box.journal("expertd"), 10)
        expect("a restart is needed for profile.name" in self.box.journal("expertd"), "journal")
        wait_for("READY after the reload", lambda: self.box.show("expertd", "ActiveState") == ["active"], 10)
        expect(self.main_pid() == self.pid, "another process")

    def keeps_the_old_settings_when_the_new_are_wrong(self) -> None:
        """a reload with a wrong file changes nothing and says why"""
        self.configure(extra="[nonsense]\n")
        self.box.run("systemctl", "reload", "expertd")
        wait_for("the word", lambda: "nonsense: unknown section" in self.box.journal("expertd"), 10)
        expect(self.get("/readyz")[0] == 200, "not ready")
        self.configure()

    def is_killed_by_the_watchdog_and_comes_back(self) -> None:
        """a process that stands still is killed by the watchdog and started again"""
        self.box.run("kill", "-STOP", self.pid)
        wait_for("the restart", lambda: self.box.show("expertd", "NRestarts") == ["1"], 40)
        expect("Watchdog timeout" in self.box.journal("expertd"), "journal")
        wait_for("readiness", lambda: self.get("/readyz")[0] == 200, 30)
        expect(self.main_pid() != self.pid, "the same process")

    def comes_back_after_kill_9(self) -> None:
        """kill -9 is followed by a restart"""
        before = self.main_pid()
        self.box.run("kill", "-KILL", before)
        wait_for("a new process", lambda: self.main_pid() not in ("0", before), 20)
        wait_for("readiness", lambda: self.get("/readyz")[0] == 200, 30)

    def stops_cleanly_and_keeps_its_directory(self) -> None:
        """systemctl stop ends it with 0 in time; its socket is gone and its state directory stays"""
        began = time.monotonic()
        self.box.run("systemctl", "stop", "expertd")
        expect(time.monotonic() - began < 20, "slow")
        expect(self.box.show("expertd", "Result", "ExecMainStatus") == ["success", "0"], "result")
        expect(not (self.root / "run/expertd").exists(), "the runtime directory is left")
        self.box.run("test", "-d", "/var/lib/private/expertd")

    def takes_keys_as_credentials(self) -> None:
        """keys in /etc/credstore are loaded as credentials and asked for"""
        (self.root / "etc/credstore/expertd.api-keys").write_text(API_KEY + "\n")
        (self.root / "etc/credstore/expertd.admin-key").write_text(ADMIN_KEY + "\n")
        self.box.run("systemctl", "start", "expertd")
        expect(self.get("/v1/models")[0] == 401, self.get("/v1/models"))
        expect(self.get("/v1/models", f"Authorization: Bearer {API_KEY}")[0] == 200, "refused")
        refused = self.get("/expertd/evict", f"Authorization: Bearer {API_KEY}", body="{}")
        expect(refused[0] in (401, 403), refused)
        expect(API_KEY not in self.box.journal("expertd"), "a key in the journal")

    def does_not_start_again_on_a_fault_of_configuration(self) -> None:
        """a wrong configuration ends the start at once with one line, without restarts"""
        self.configure(extra="[trace]\nbuget = 3\n")
        self.box.run("systemctl", "start", "expertd", check=False)
        expect(self.box.show("expertd", "ActiveState", "ExecMainStatus", "NRestarts") == ["failed", "2", "0"], "state")
        expect("expertd.toml" in self.box.journal("expertd"), self.box.journal("expertd")[-400:])
        expect("Traceback" not in self.box.journal("expertd"), "a traceback")

    def runs_two_instances(self) -> None:
        """two instances of the template run side by side"""
        ports = {"one": free_port(), "two": free_port()}
        for name, port in ports.items():
            self.configure(name, port=port)
            self.box.run("systemctl", "start", f"expertd@{name}")
        for name, port in ports.items():
            expect(self.get("/readyz", port=port)[0] == 200, name)
            self.box.run("expertd", "status", "--socket", f"/run/expertd-{name}/admin.sock")

    def reads_models_below_home_with_the_drop_in(self) -> None:
        """a model below /home needs the drop-in, and is served with it"""
        home = self.root / "home/models"
        home.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / "srv/models/tiny.gguf", home / "tiny.gguf")
        file = self.root / "etc/expertd/expertd.toml"
        file.write_text(file.read_text().replace("/srv/models", "/home/models"))
        self.box.run("systemctl", "start", "expertd", check=False)
        expect(self.box.show("expertd", "ActiveState")[0] != "active", "started without the drop-in")
        self.box.run("systemctl", "stop", "expertd", check=False)
        self.box.run("systemctl", "reset-failed", "expertd", check=False)
        drop_in(self.root, "home", (REPO / "systemd/drop-ins/home-models.conf").read_text())
        self.box.run("systemctl", "daemon-reload")
        self.box.run("systemctl", "start", "expertd")
        expect(self.get("/readyz")[0] == 200, "not ready")

    def warms_and_holds_without_the_daemon(self) -> None:
        """expertd-warm@ locks a model's dense weights and holds them"""
        unit = "expertd-warm@" + self.box.run("systemd-escape", "--path", "/srv/models/tiny.gguf").strip()
        self.box.run("systemctl", "start", unit)
        pid = self.main_pid(unit)

        def locked() -> bool:
            text = self.box.run("cat", f"/proc/{pid}/status", check=False)
            return any(line.startswith("VmLck:") and int(line.split()[1]) > 1024 for line in text.splitlines())

        wait_for("locked memory", locked, 20)
        self.box.run("systemctl", "stop", unit)
        expect(self.box.show(unit, "Result") == ["success"], self.box.journal(unit)[-400:])

    def is_uninstalled_by_make(self) -> None:
        """make uninstall stops what runs and leaves the configuration and the state, and nothing else"""
        self.configure("one", port=free_port())
        self.box.run("systemctl", "enable", "--now", "expertd", "expertd@one")
        pids = [self.main_pid(), self.main_pid("expertd@one")]
        body = json.dumps({"prompt": "The", "max_tokens": 8, "ignore_eos": True})
        expect(self.get("/v1/completions", body=body)[0] == 200, "no answer")
        self.box.run(*MAKE, "uninstall")
        for pid in pids:
            expect(not self.box.run("ps", "--no-headers", "-p", pid, check=False).strip(), f"{pid} runs")
        listed = self.box.run("systemctl", "list-units", "--all", "--no-legend", "expertd*", check=False)
        expect(not listed.strip(), listed)
        kept = ("etc/expertd/", "etc/systemd/system/expertd.service.d/", "var/lib/private/expertd", "var/lib/expertd")
        left = sorted(
            name
            for name in files(self.root) - self.before
            if ("expertd" in name or name.startswith("usr/local/")) and not name.startswith(kept)
        )
        expect(not left, left)
        expect((self.root / "etc/expertd/expertd.toml").exists(), "the configuration is gone")
        expect(any((self.root / "var/lib/private/expertd").rglob("*.profile")), "the profiles are gone")

    def rest(self) -> None:
        """Everything stopped, the configuration sound."""
        self.box.run("systemctl", "stop", "expertd", "expertd@*", "expertd-warm@*", check=False)
        for key in (self.root / "etc/credstore").iterdir():
            key.unlink()
        self.box.run("systemctl", "reset-failed", check=False)
        self.configure()

    def checks(self) -> Iterator[Callable[[], None]]:
        """First those of one running daemon, then those that start their own."""
        yield self.is_installed_by_make
        yield self.starts_and_is_ready_when_start_returns
        yield self.says_its_status
        yield self.runs_as_a_dynamic_user_without_capabilities
        yield self.pins_the_dense_weights
        yield self.answers_and_steers
        yield self.opens_the_socket_to_its_group_alone
        yield self.reloads
        yield self.keeps_the_old_settings_when_the_new_are_wrong
        yield self.is_killed_by_the_watchdog_and_comes_back
        yield self.comes_back_after_kill_9
        yield self.stops_cleanly_and_keeps_its_directory
        for check in (
            self.takes_keys_as_credentials,
            self.does_not_start_again_on_a_fault_of_configuration,
            self.runs_two_instances,
            self.reads_models_below_home_with_the_drop_in,
            self.warms_and_holds_without_the_daemon,
            self.is_uninstalled_by_make,
        ):
            self.rest()
            yield check


def live(root: Path, wheels: Path) -> list[str]:
    """Boots, checks, powers off; the failures as lines."""
    prepare(root)
    container = Container(root, wheels)
    failures = []
    try:
        life = Life(root, container)
        for check in life.checks():
            try:
                check()
            except (Failed, subprocess.TimeoutExpired) as error:
                failures.append(f"{check.__doc__}: {error}")
                print(f"FAIL  {failures[-1]}", flush=True)
            else:
                print(f"ok    {check.__doc__}", flush=True)
        if failures:
            print(container.journal("expertd")[-6000:])
    finally:
        container.stop()
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, help="Where the container is made, and kept.")
    given = parser.parse_args().root
    with tempfile.TemporaryDirectory() as temporary:
        root = given or Path(temporary) / "root"
        root.parent.mkdir(parents=True, exist_ok=True)
        try:
            make_root(root)
            wheels = Path(temporary) / "wheels"
            pack_all(wheels)
            return 1 if live(root, wheels) else 0
        except Failed as error:
            print(f"FAIL  {error}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
