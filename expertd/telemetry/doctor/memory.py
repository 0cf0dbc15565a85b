"""Memory: the cgroup's limit, swap, what may be locked by this user and by a running daemon, NUMA, RAM channels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from expertd.pages import locks
from expertd.pages.memory import MemorySnapshot, snapshot
from expertd.telemetry.doctor.check import OK, WARN, Check, Subject, text
from expertd.units import format_size

_DEFAULT_MEMLOCK = 8 << 20


def checks(subject: Subject) -> list[Check]:
    machine = snapshot(subject.root)
    found = [available(machine), cgroup(machine), swap(machine, subject), memlock(), *daemon_memlock(subject)]
    return [*found, numa(subject), channels()]


def available(machine: MemorySnapshot) -> Check:
    """What could be used now."""
    why = "The automatic budget is what is left here after dense weights, KV cache and a reserve."
    value = f"{format_size(machine.usable_bytes)} of {format_size(machine.total_bytes)}"
    if machine.usable_bytes < machine.limit_bytes // 4:
        return Check("memory", WARN, value, why, "End what else uses memory: `ps aux --sort -rss | head`.")
    return Check("memory", OK, value, why)


def cgroup(machine: MemorySnapshot) -> Check:
    """The tightest limit above this process; a service's may differ."""
    why = "Page cache counts towards a cgroup's limit: below it the kernel drops the model's pages."
    if machine.cgroup is None:
        return Check("cgroup", OK, "no limit", why)
    c = machine.cgroup
    value = f"{format_size(c.limit_bytes)} at {c.path} (v{c.version}), {format_size(c.available_bytes)} left"
    if c.limit_bytes < machine.total_bytes // 2:
        fix = "Raise or remove the limit (MemoryMax=, MemoryHigh=, docker --memory); protect with MemoryLow= instead."
        return Check("cgroup", WARN, value, why, fix)
    return Check("cgroup", OK, value, why)


def swap(machine: MemorySnapshot, subject: Subject) -> Check:
    """Swap takes what is not locked: KV cache and buffers."""
    why = "Where swap is in use, KV cache and buffers may be read back from disk; zram takes the memory of experts."
    swappiness = text(subject.root / "proc/sys/vm/swappiness")
    value = f"{format_size(machine.swap_used_bytes)} of {format_size(machine.swap_total_bytes)} used"
    value += ", zram" if machine.zram else ""
    value += f", swappiness {swappiness}" if swappiness else ""
    if machine.zram:
        return Check("swap", WARN, value, why, "swapoff the zram device while a model larger than RAM is served.")
    if machine.swap_used_bytes > machine.total_bytes // 20:
        return Check("swap", WARN, value, why, "End what else uses memory, then `swapoff -a && swapon -a`.")
    return Check("swap", OK, value if machine.swap_total_bytes else "none", why)


def memlock() -> Check:
    """The limit of whoever runs doctor."""
    why = "Dense weights and pinned experts are locked; beyond the limit they are only kept warm."
    limit = locks.lock_limit()
    if limit is None:
        return Check("memlock", OK, "unlimited for this user", why)
    if limit <= _DEFAULT_MEMLOCK:
        fix = "For a login: `ulimit -l`, /etc/security/limits.conf (memlock); for a unit: LimitMEMLOCK=infinity."
        return Check("memlock", WARN, format_size(limit), why, fix)
    return Check("memlock", OK, format_size(limit), why)


def daemon_memlock(subject: Subject) -> list[Check]:
    """The limit of each running daemon whose limits this user may read."""
    return [_daemon(pid) for pid in daemons(subject.root)]


def daemons(root: Path) -> list[Path]:
    """The /proc directories of running `expertd serve`."""
    found = []
    for directory in sorted((root / "proc").glob("[0-9]*")):
        words = text(directory / "cmdline").split("\0")
        if "serve" in words and any(w.rpartition("/")[2] == "expertd" for w in words[:3]):
            found.append(directory)
    return found


def _daemon(directory: Path) -> Check:
    why = "The daemon's own limit counts, not that of your shell."
    name = f"daemon {directory.name}"
    found = re.search(r"^Max locked memory\s+(\S+)", text(directory / "limits"), re.MULTILINE)
    locked = re.search(r"^VmLck:\s+(\d+)", text(directory / "status"), re.MULTILINE)
    if not found:
        return Check("daemon_memlock", OK, f"{name}: not told to this user", why)
    held = format_size(int(locked[1]) * 1024) if locked else "unknown"
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)", text(directory / "status"), re.MULTILINE)
    lifted = capable is not None and int(capable[1], 16) >> 14 & 1
    if found[1] == "unlimited" or lifted:
        return Check("daemon_memlock", OK, f"{name}: unlimited, {held} locked", why)
    value = f"{name}: {format_size(int(found[1]))}, {held} locked"
    if int(found[1]) <= _DEFAULT_MEMLOCK:
        return Check("daemon_memlock", WARN, value, why, "LimitMEMLOCK=infinity in the unit, or `ulimit -l` before it.")
    return Check("daemon_memlock", OK, value, why)


def numa(subject: Subject) -> Check:
    """More than one node with memory."""
    nodes = list((subject.root / "sys/devices/system/node").glob("node[0-9]*"))
    why = "With several memory nodes, pages lie on the node that read them first, and the others reach them slowly."
    if len(nodes) <= 1:
        return Check("numa", OK, "one node", why)
    return Check(
        "numa", WARN, f"{len(nodes)} nodes", why, "Start with `numactl --interleave=all`, or bind to one node."
    )


def channels() -> Check:
    """How many memory modules sit in how many channels; only root may ask, only real machines answer."""
    why = "Decoding what is resident is bound by memory bandwidth, which grows with the channels in use."
    if shutil.which("dmidecode") is None:
        return Check("ram_channels", OK, "unknown (dmidecode is not installed)", why)
    try:
        done = subprocess.run(["dmidecode", "-t", "memory"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return Check("ram_channels", OK, "unknown", why)
    return from_dmidecode(done.stdout, why)


def from_dmidecode(output: str, why: str) -> Check:
    """Counts modules that are there, and the channels that their locators name."""
    modules, seen = 0, set()
    for block in output.split("Memory Device")[1:]:
        size = re.search(r"^\s*Size: (\d+) [GM]B", block, re.MULTILINE)
        if not size:
            continue
        modules += 1
        place = " ".join(re.findall(r"^\s*(?:Bank )?Locator: (.*)$", block, re.MULTILINE))
        channel = re.search(r"channel\s*([A-Z0-9]+)", place, re.IGNORECASE) or re.search(r"DIMM[ _]?([A-Z])\d?", place)
        if channel:
            seen.add(channel[1].upper())
    if not modules:
        return Check("ram_channels", OK, "unknown (a virtual machine, or not root)", why)
    value = f"{modules} modules" + (f" in {len(seen)} channels" if seen else "")
    if modules == 1 or len(seen) == 1:
        return Check(
            "ram_channels", WARN, value, why, "Add a second module in the other channel, as the board's manual says."
        )
    return Check("ram_channels", OK, value, why)
