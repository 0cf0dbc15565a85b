"""Each check of `expertd doctor` on machines made of files, and the verb on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from expertd.cli.doctor import command
from expertd.pages.disk import Speed
from expertd.telemetry.doctor import kernel, memory, model, processor, storage
from expertd.telemetry.doctor.check import Check, Subject
from expertd.telemetry.doctor.run import examine

MEMINFO = """\
MemTotal: 67108864 kB
MemFree: 1000000 kB
MemAvailable: {available} kB
SwapTotal: {swap} kB
SwapFree: {free} kB
"""


class Machine:
    """A root with the files that the checks read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/sys/kernel/osrelease", "6.8.0-31-generic")
        self.write("proc/version", "Linux version 6.8.0")
        self.write("proc/meminfo", MEMINFO.format(available=60_000_000, swap=0, free=0))
        self.write("proc/sys/vm/max_map_count", "65530")
        self.write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")
        (root / "sys/devices/system/node/node0").mkdir(parents=True)

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    @property
    def subject(self) -> Subject:
        return Subject(root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        if not os.stat(Path(name).parent).st_mode & 0o001:
            pytest.skip("the directory for temporary files is closed to other users")
        yield Path(name)


def by_id(checks: list[Check]) -> dict[str, Check]:
    for check in checks:
        assert check.status in ("ok", "warn", "fail")
        assert check.value
        assert check.why.endswith(".")
        assert (check.status == "ok") == (check.fix == "")
    return {check.id: check for check in checks}


def test_a_sound_machine_is_all_ok(machine: Machine) -> None:
    found = by_id(kernel.checks(machine.subject) + memory.checks(machine.subject))
    host = {"memlock", "cachestat", "ram_channels"}
    assert {i for i, c in found.items() if c.status != "ok"} <= host


@pytest.mark.parametrize(
    ("release", "status", "value"),
    [
        ("6.8.0-31-generic", "ok", "6.8.0-31-generic"),
        ("6.1.0-18-amd64", "ok", "6.1.0-18-amd64 (without cachestat)"),
        ("5.10.0", "warn", "5.10.0"),
    ],
)
def test_kernels(machine: Machine, release: str, status: str, value: str) -> None:
    machine.write("proc/sys/kernel/osrelease", release)
    found = kernel.version(machine.subject)
    assert (found.status, found.value) == (status, value)


def test_pressure_wsl_and_maps(machine: Machine) -> None:
    machine.write("proc/pressure/memory", "some avg10=42.50 avg60=0 avg300=0 total=1\n")
    machine.write("proc/version", "Linux version 5.15.1-microsoft-standard-WSL2")
    machine.write("proc/sys/vm/max_map_count", "1024")
    found = by_id(kernel.checks(machine.subject))
    assert found["psi"].value == "42 % of the last 10 s were stalled"
    assert found["wsl"].status == "warn"
    assert found["max_map_count"].status == "warn"
    (machine.root / "proc/pressure/memory").unlink()
    assert kernel.pressure(machine.subject).fix == "Boot with psi=1 (CONFIG_PSI)."


def test_reclaim_of_idle_pages(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = "sys/kernel/mm/damon/admin/kdamonds/0"
    machine.write(f"{scheme}/contexts/0/schemes/0/action", "stat\n")
    machine.write(f"{scheme}/state", "on\n")
    assert kernel.damon(machine.subject).value == "none", "it only looks"
    machine.write(f"{scheme}/contexts/0/schemes/0/action", "pageout\n")
    assert "--hold" in kernel.damon(machine.subject).fix
    machine.write(f"{scheme}/state", "off\n")
    assert kernel.damon(machine.subject).status == "ok"
    machine.write("sys/module/damon_reclaim/parameters/enabled", "Y\n")
    assert kernel.damon(machine.subject).status == "warn"
    machine.write("sys/module/damon_reclaim/parameters/enabled", "N\n")
    machine.write("proc/77/comm", "kdamond.0\n")
    for user, value in ((0, "none"), (1000, "DAMON runs; only root may see whether it takes pages")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert kernel.damon(machine.subject).value == value


def test_swap_zram_and_little_memory(machine: Machine) -> None:
    machine.write("proc/meminfo", MEMINFO.format(available=9_000_000, swap=16_000_000, free=2_000_000))
    machine.write("proc/sys/vm/swappiness", "60\n")
    found = by_id(memory.checks(machine.subject))
    assert found["memory"].status == "warn"
    assert found["swap"].status == "warn"
    assert "swappiness 60" in found["swap"].value
    machine.write("proc/swaps", "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 100\n")
    assert "zram" in by_id(memory.checks(machine.subject))["swap"].fix


def test_a_cgroups_limit_is_found(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/system.slice/expertd.service\n")
    machine.write("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/system.slice/memory.max", f"{8 << 30}\n")
    machine.write("sys/fs/cgroup/system.slice/memory.current", f"{1 << 30}\n")
    machine.write("sys/fs/cgroup/system.slice/expertd.service/memory.max", "max\n")
    found = by_id(memory.checks(machine.subject))["cgroup"]
    assert found.status == "warn"
    assert found.value.startswith("8.0 GiB at ")


def test_the_daemons_own_limit_is_read(machine: Machine) -> None:
    machine.write("proc/77/cmdline", "/opt/venv/bin/python\0/usr/local/bin/expertd\0serve\0--port\0" + "1")
    machine.write("proc/77/limits", "Max locked memory         8388608              8388608              bytes\n")
    machine.write("proc/77/status", "VmLck:\t    4096 kB\nCapEff:\t0000000000000000\n")
    machine.write("proc/78/cmdline", "vim\0serve.py\0")
    found = memory.daemon_memlock(machine.subject)
    assert [(c.status, c.value) for c in found] == [("warn", "daemon 77: 8.0 MiB, 4.0 MiB locked")]
    machine.write("proc/77/status", "VmLck:\t    4096 kB\nCapEff:\t0000000000004000\n")
    assert memory.daemon_memlock(machine.subject)[0].value == "daemon 77: unlimited, 4.0 MiB locked"


def test_numa_and_channels(machine: Machine) -> None:
    (machine.root / "sys/devices/system/node/node1").mkdir()
    assert memory.numa(machine.subject).status == "warn"
    module = "Memory Device\n\tSize: 16 GB\n\tLocator: DIMM 0\n\tBank Locator: P0 CHANNEL {}\n"
    assert memory.from_dmidecode(module.format("A") + module.format("A"), "w.").status == "warn"
    both = memory.from_dmidecode(module.format("A") + module.format("B"), "w.")
    assert (both.status, both.value) == ("ok", "2 modules in 2 channels")
    empty = "Memory Device\n\tSize: No Module Installed\n"
    assert memory.from_dmidecode(module.format("A") + empty, "w.").status == "warn"
    assert memory.from_dmidecode(empty, "w.").value.startswith("unknown")


def test_threads_and_build(machine: Machine) -> None:
    assert processor.cores(replace(machine.subject, threads=4096)).status == "warn"
    assert processor.cores(machine.subject).status == "ok"
    cpuinfo = "flags\t\t: fpu avx avx2 fma f16c avx512f\n"
    lacking = processor.from_description("CPU : SSE3 = 1 | AVX2 = 1 | ", cpuinfo, "w.")
    assert lacking.status == "warn"
    assert lacking.value == "AVX2; the processor also has AVX512, FMA, F16C"
    whole = "CPU : AVX2 = 1 | AVX512 = 1 | FMA = 1 | F16C = 1 | "
    assert processor.from_description(whole, cpuinfo, "w.").status == "ok"


def test_the_first_closed_step_on_the_way_is_named(public: Path) -> None:
    closed = public / "a" / "closed"
    (closed / "deep").mkdir(parents=True)
    file = closed / "deep" / "m.gguf"
    file.write_bytes(b"GGUF")
    assert storage.permissions(file).status == "ok"
    closed.chmod(0o700)
    (closed / "deep").chmod(0o700)
    found = storage.permissions(file)
    assert found.value == f"{closed} is closed to other users (drwx------)"
    assert f"chmod o+x {closed}" in found.fix
    closed.chmod(0o755)
    (closed / "deep").chmod(0o755)
    file.chmod(0o600)
    assert storage.permissions(file).fix.startswith(f"chmod o+r {file}")
    link = public / "link.gguf"
    link.symlink_to(file)
    assert str(file) in storage.permissions(link).value
    gone = storage.permissions(public / "gone" / "m.gguf")
    assert (gone.status, gone.value) == ("fail", f"{public}/gone: No such file or directory")


@pytest.mark.root
def test_a_step_closed_to_this_user_fails(public: Path) -> None:
    closed = public / "closed"
    closed.mkdir(mode=0o700)
    (closed / "m.gguf").write_bytes(b"GGUF")
    script = (
        "import os, sys; from pathlib import Path; from expertd.telemetry.doctor import storage; os.setgid(65534);"
        "os.setuid(65534); c = storage.permissions(Path(sys.argv[1])); print(c.status, c.value)"
    )
    argument = str(closed / "m.gguf")
    done = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, check=True)
    assert done.stdout == f"fail {closed} is closed to this user\n"


def test_read_ahead_and_file_systems(machine: Machine, demo_model: Path) -> None:
    device = os.stat(demo_model).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    subject = replace(machine.subject, model=demo_model)
    machine.write(f"sys/class/bdi/{name}/read_ahead_kb", "8192")
    machine.write(f"sys/dev/block/{name}/queue/max_sectors_kb", "1280")
    found = storage.read_ahead(subject)
    assert (found.status, found.value) == ("warn", "8192 KiB")
    assert f"/sys/class/bdi/{name}/read_ahead_kb" in found.fix
    for kind, status in (("ext4", "ok"), ("zfs", "warn"), ("9p", "warn"), ("nfs4", "warn"), ("overlay", "warn")):
        machine.write("proc/self/mountinfo", f"30 1 0:26 / / rw - {kind} source rw\n")
        assert storage.file_system(subject).status == status, kind


def test_disk_speed_is_judged_by_random_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.truncate(100 << 20)
    for random, status in ((90e6, "warn"), (500e6, "ok"), (3e9, "ok")):
        monkeypatch.setattr(storage.disk, "probe", lambda *_, random=random, **__: Speed(2 * random, random, 1, 1.0))
        assert storage.speed(large).status == status
    assert storage.speed(demo_model).value.startswith("not measured")


def test_homes_are_hidden_from_the_unit() -> None:
    assert "home-models.conf" in storage.sandbox(Path("/home/u/m.gguf")).fix
    assert storage.sandbox(Path("/srv/models/m.gguf")).status == "ok"


def test_state_directory_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = Subject(state_directory=tmp_path / "not" / "there")
    assert storage.state_room(subject).status == "ok"
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert storage.state_room(subject).status == "warn"


def test_settings_against_steering() -> None:
    assert model.flags(Subject()).status == "ok"
    found = model.flags(Subject(steering="off", load="stock", lock_dense=False))
    assert found.value.count(";") == 2
    assert model.flags(Subject(steering="on", n_gpu_layers=9)).status == "warn"


def test_room_for_the_experts(machine: Machine, demo_model: Path) -> None:
    layout, check = model.header(Subject(model=demo_model))
    assert check.value.startswith("8 layers of 64 experts")
    assert layout is not None
    assert model.room(layout, machine.subject).value.startswith("100% of the experts fit")
    need = layout.dense_nbytes
    for spare, status in ((layout.expert_nbytes * 9 // 10, "ok"), (layout.expert_nbytes // 4, "warn"), (1, "fail")):
        machine.write("proc/meminfo", MEMINFO.format(available=(need + spare) // 1024, swap=0, free=0))
        assert model.room(layout, machine.subject).status == status
    over = model.room(layout, replace(machine.subject, budget_nbytes=1 << 40))
    assert "only" in over.value


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"not a model")
    layout, check = model.header(Subject(model=file))
    assert layout is None
    assert check.status == "fail"
    assert "\n" not in check.value


def test_a_check_that_breaks_does_not_end_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Subject) -> list[Check]:
        raise OSError("no such device")

    monkeypatch.setattr(kernel, "checks", broken)
    found = {c.id: c for c in examine(machine.subject, probe=False)}
    assert found["kernel"].value == "could not be examined: no such device"
    assert "threads" in found


def test_the_verb_on_this_machine(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(command, [str(demo_model), "--json"], standalone_mode=False)
    assert result.exception is None
    checks = json.loads(result.output)["checks"]
    assert {frozenset(c) for c in checks} == {frozenset(("id", "status", "value", "why", "fix"))}
    ids = [c["id"] for c in checks]
    assert {"path", "file_system", "read_ahead", "disk_speed", "model", "room", "memory", "cgroup", "swap"} <= set(ids)
    assert {"memlock", "kernel", "cachestat", "psi", "thp", "wsl", "numa", "threads", "build", "settings"} <= set(ids)
    text = CliRunner().invoke(command, [str(demo_model), "--no-probe"], standalone_mode=False).output
    assert text.splitlines()[-1].endswith("failed")
    missing = CliRunner().invoke(command, [str(tmp_path / "none.gguf"), "--no-probe"], standalone_mode=False)
    assert missing.return_value == 1
