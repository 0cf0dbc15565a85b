"""What memory this machine and the tightest cgroup above this process really have, in one snapshot.

Reads files under /proc and /sys/fs/cgroup (another root may be given) and nothing else. cgroup v2 and v1, limits of
ancestors, `memory.high` below `memory.max`, v1's sentinel for "no limit", unreadable files (as no limit). What follows
for the budget lies in `budget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertd.pages import libc

ROOT = Path("/")
# v1 says "no limit" with the largest page-aligned long; nothing real comes near it.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Level:
    """The directory of one memory cgroup."""

    version: int
    path: Path


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One level with a limit. Bytes; `file_bytes` are those of `usage_bytes` that reclaim could take."""

    path: Path
    version: int
    limit_bytes: int
    usage_bytes: int
    file_bytes: int
    anon_bytes: int
    kernel_bytes: int
    unevictable_bytes: int

    @property
    def available_bytes(self) -> int:
        """What could be used before anything but file pages must go."""
        return max(0, self.limit_bytes - self.usage_bytes + self.file_bytes)


@dataclass(frozen=True, slots=True)
class Pressure:
    """PSI of memory: seconds in which some or all tasks stalled, since boot, and the 10 s average in percent.

    `machine`: of the whole machine, where tasks may stall because of limits that are not ours; else of the tightest
    cgroup or the process's own."""

    some_seconds: float
    full_seconds: float
    some_avg10: float
    full_avg10: float
    machine: bool


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The machine and its tightest cgroup (None: no limit above this process). Bytes."""

    total_bytes: int
    free_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    zram: bool
    cgroup: Cgroup | None
    pressure: Pressure | None

    @property
    def limit_bytes(self) -> int:
        """The most this process could ever have: the machine's memory, or the cgroup's limit."""
        return self.total_bytes if self.cgroup is None else min(self.total_bytes, self.cgroup.limit_bytes)

    @property
    def usable_bytes(self) -> int:
        """What is free or reclaimable now, where it is scarcest."""
        if self.cgroup is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup.available_bytes)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What the kernel took since boot. Bytes of file pages read again soon after it took them, bytes of anonymous
    memory that it wrote to swap; of this process's own cgroup where that counts them, else of the machine."""

    refault_bytes: int
    swapped_out_bytes: int


def snapshot(root: Path = ROOT, levels: Sequence[Level] | None = None) -> MemorySnapshot:
    """Read it all now. A file that cannot be read counts as absent. `levels` saves finding them again."""
    info = table(root / "proc/meminfo", 1024)
    total = info.get("MemTotal", 0)
    free = info.get("MemFree", 0)
    levels = cgroup_levels(root) if levels is None else levels
    cgroup = tightest_cgroup(levels, total)
    return MemorySnapshot(
        total_bytes=total,
        free_bytes=free,
        available_bytes=info.get("MemAvailable", free + info.get("Cached", 0)),
        swap_total_bytes=info.get("SwapTotal", 0),
        swap_used_bytes=info.get("SwapTotal", 0) - info.get("SwapFree", 0),
        zram="/zram" in _text(root / "proc/swaps"),
        cgroup=cgroup,
        pressure=_pressure(root, [cgroup.path] if cgroup is not None else [level.path for level in levels[:1]]),
    )


def reclaim(root: Path = ROOT, levels: Sequence[Level] | None = None) -> Reclaim:
    """Counters of the first level that has them (the process's own cgroup), else the machine's."""
    machine = table(root / "proc/vmstat", libc.PAGE)
    for level in cgroup_levels(root) if levels is None else levels:
        stat = table(level.path / "memory.stat", libc.PAGE)
        name = ("total_" if level.version == 1 else "") + "workingset_refault_file"
        if name in stat:
            return Reclaim(stat[name], stat.get("pswpout", machine.get("pswpout", 0)))
    return Reclaim(machine.get("workingset_refault_file", 0), machine.get("pswpout", 0))


def anon_nbytes(root: Path = ROOT) -> int:
    """Anonymous memory of this process; 0 where the kernel does not tell."""
    return table(root / "proc/self/status", 1024).get("RssAnon", 0)


def cgroup_levels(root: Path = ROOT) -> list[Level]:
    """This process's memory cgroup and its ancestors up to the mount, innermost first; v1 and v2."""
    found = []
    for version, mount, path in _memberships(root):
        level = path
        found.append(Level(version, level))
        while level != mount and mount in level.parents:
            level = level.parent
            found.append(Level(version, level))
    return found


def tightest_cgroup(levels: Sequence[Level], total_bytes: int = 0) -> Cgroup | None:
    """Of these, the limited one with the least left; limits of `total_bytes` and above are none."""
    found = [c for c in (_read_level(level, total_bytes) for level in levels) if c is not None]
    return min(found, key=lambda c: (c.available_bytes, c.limit_bytes), default=None)


def _memberships(root: Path) -> list[tuple[int, Path, Path]]:
    """(version, mount point, own directory) of each hierarchy that may hold a memory limit."""
    own: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own["v2"] = path
        elif "memory" in controllers.split(","):
            own["v1"] = path
    found = []
    for kind, mount_root, mount in _mounts(root):
        if kind in own:
            path = own[kind]
            inner = path[len(mount_root) :] if mount_root != "/" and path.startswith(mount_root) else path
            directory = mount / inner.lstrip("/")
            found.append((1 if kind == "v1" else 2, mount, directory if directory.is_dir() else mount))
    return found


def _mounts(root: Path) -> list[tuple[str, str, Path]]:
    """(v1 or v2, root of the mount within the hierarchy, mount point) from mountinfo."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        point = root / fields[4].lstrip("/")
        if kinds[0] == "cgroup2":
            found.append(("v2", fields[3], point))
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            found.append(("v1", fields[3], point))
    return found


def _read_level(level: Level, total_bytes: int) -> Cgroup | None:
    version, path = level.version, level.path
    if version == 2:
        limits = [_number(path / "memory.max"), _number(path / "memory.high")]
        usage = _number(path / "memory.current")
    else:
        limits = [_number(path / "memory.limit_in_bytes")]
        usage = _number(path / "memory.usage_in_bytes")
    real = [n for n in limits if n is not None and n < _NO_LIMIT and not 0 < total_bytes <= n]
    if not real:
        return None
    stat = table(path / "memory.stat", 1)
    prefix = "total_" if version == 1 else ""
    return Cgroup(
        path=path,
        version=version,
        limit_bytes=min(real),
        usage_bytes=usage or 0,
        file_bytes=stat.get(prefix + "active_file", 0) + stat.get(prefix + "inactive_file", 0),
        anon_bytes=stat.get("total_rss", 0) if version == 1 else stat.get("anon", 0),
        kernel_bytes=_number(path / "memory.kmem.usage_in_bytes") or 0 if version == 1 else stat.get("kernel", 0),
        unevictable_bytes=stat.get(prefix + "unevictable", 0),
    )


def _pressure(root: Path, cgroups: Sequence[Path]) -> Pressure | None:
    """Of the first cgroup that has its own (v2), else the machine's."""
    own = next(filter(None, (_text(path / "memory.pressure") for path in cgroups)), "")
    text = own or _text(root / "proc/pressure/memory")
    rows: dict[str, dict[str, float]] = {}
    for line in filter(str.strip, text.splitlines()):
        kind, *pairs = line.split()
        try:
            rows[kind] = {key: float(value) for key, _, value in (p.partition("=") for p in pairs)}
        except ValueError:
            return None
    if "some" not in rows:
        return None
    some, full = rows["some"], rows.get("full", {})
    return Pressure(
        some.get("total", 0) / 1e6, full.get("total", 0) / 1e6, some.get("avg10", 0), full.get("avg10", 0), not own
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def table(path: Path, unit: int) -> dict[str, int]:
    """`Name: 123 kB` or `name 123` lines, times `unit`. Empty when the file cannot be read."""
    found = {}
    for line in _text(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            found[fields[0].rstrip(":")] = int(fields[1]) * unit
    return found
