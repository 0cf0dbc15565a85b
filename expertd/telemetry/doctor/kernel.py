"""The kernel: its version, the calls steering needs, pressure accounting, reclaim of idle pages, huge pages, WSL."""

from __future__ import annotations

import os
import re

from expertd.pages import libc
from expertd.telemetry.doctor.check import OK, WARN, Check, Subject, text

_CACHESTAT_SINCE, _POPULATE_SINCE = (6, 5), (5, 14)


def checks(subject: Subject) -> list[Check]:
    return [
        version(subject), cachestat(), pressure(subject), damon(subject), huge_pages(subject), wsl(subject),
        map_count(subject),
    ]  # fmt: skip


def version(subject: Subject) -> Check:
    """Old kernels work, with less."""
    release = text(subject.root / "proc/sys/kernel/osrelease")
    number = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    why = "Linux 5.14 waits for pages without touching them one by one, 6.5 tells what is in the page cache."
    if number < _POPULATE_SINCE:
        return Check("kernel", WARN, release, why, "Install a kernel of 6.5 or later.")
    if number < _CACHESTAT_SINCE:
        return Check("kernel", OK, f"{release} (without cachestat)", why)
    return Check("kernel", OK, release, why)


def cachestat() -> Check:
    """Whether the call is there and not filtered (containers, sandboxes)."""
    why = "Residency of the model's pages is then known and not guessed; steering works without it."
    fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        answer = libc.cachestat(fd, 0, libc.PAGE)
    finally:
        os.close(fd)
    if not isinstance(answer, int):
        return Check("cachestat", OK, "works", why)
    name = os.strerror(answer)
    if not os.access(__file__, os.W_OK):
        return Check("cachestat", OK, f"not told to this user ({name})", why)
    return Check("cachestat", WARN, name, why, "Linux 6.5 or later; in a container, a seccomp profile that allows it.")


def pressure(subject: Subject) -> Check:
    """Pressure stall information."""
    why = "The automatic budget sees from it that memory is short before the kernel reclaims."
    found = text(subject.root / "proc/pressure/memory")
    if not found:
        return Check("psi", WARN, "not there", why, "Boot with psi=1 (CONFIG_PSI).")
    average = re.search(r"some avg10=([\d.]+)", found)
    value = float(average[1]) if average else 0.0
    if value > 10:
        fix = "See what takes memory now: `ps aux --sort -rss | head`."
        return Check("psi", WARN, f"{value:.0f} % of the last 10 s were stalled", why, fix)
    return Check("psi", OK, f"there; {value:.0f} % of the last 10 s were stalled", why)


def damon(subject: Subject) -> Check:
    """DAMON (Linux 5.15) may page out what nobody touched for a while, though memory is free. Root alone may read what
    it is set to; that it runs shows by its thread."""
    why = "Warmed experts that wait for their first use are idle pages; where those are taken, the warm-up is in vain."
    sys = subject.root / "sys"
    takers = [text(sys / "module/damon_reclaim/parameters/enabled") == "Y"]
    for each in sys.glob("kernel/mm/damon/admin/kdamonds/[0-9]*"):
        actions = {text(scheme) for scheme in each.glob("contexts/*/schemes/*/action")}
        takers.append(text(each / "state") == "on" and "pageout" in actions)
    fix = "`expertd warm --hold`, or pins, keep what is warmed; turn DAMON off while a model larger than RAM is served."
    if any(takers):
        return Check("idle_reclaim", WARN, "DAMON takes pages that nobody touches", why, fix)
    names = (text(comm) for comm in (subject.root / "proc").glob("[0-9]*/comm"))
    if os.geteuid() and any(name.startswith("kdamond") for name in names):
        return Check("idle_reclaim", WARN, "DAMON runs; only root may see whether it takes pages", why, fix)
    return Check("idle_reclaim", OK, "none", why)


def huge_pages(subject: Subject) -> Check:
    """Transparent huge pages concern anonymous memory here: KV cache and buffers."""
    found = re.search(r"\[(\w+)\]", text(subject.root / "sys/kernel/mm/transparent_hugepage/enabled"))
    value = found[1] if found else "not there"
    why = (
        "Huge pages make the KV cache and buffers faster; the model's pages stay small, so that experts can go singly."
    )
    return Check("thp", OK, value, why)


def wsl(subject: Subject) -> Check:
    """Windows Subsystem for Linux."""
    release = text(subject.root / "proc/version").lower()
    why = "Under WSL, Windows decides how much memory there is, and files below /mnt are not in Linux's page cache."
    if "microsoft" not in release:
        return Check("wsl", OK, "no", why)
    fix = "Keep the model inside the Linux disk (not /mnt/c), and set memory= in .wslconfig."
    return Check("wsl", WARN, "yes", why, fix)


def map_count(subject: Subject) -> Check:
    """Each locked range splits the mapping."""
    found = text(subject.root / "proc/sys/vm/max_map_count")
    value = int(found) if found.isdigit() else 0
    why = "Each pinned expert splits the mapping of the model; beyond this number pins are refused."
    if 0 < value < 65530:
        return Check("max_map_count", WARN, str(value), why, "sysctl vm.max_map_count=262144")
    return Check("max_map_count", OK, str(value) if value else "unknown", why)
