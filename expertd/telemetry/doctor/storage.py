"""The way to the model: permissions, file system, read-ahead, the disk's speed; and room for the state directory."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from expertd.errors import PagesError
from expertd.pages import disk
from expertd.telemetry.doctor.check import FAIL, OK, WARN, Check, Subject
from expertd.units import format_size

_LARGE_READ_AHEAD_KB = 512
_SLOW, _USABLE = 200e6, 1e9
_LEAST_FREE = 256 << 20
# Below this a probe measures the first request and little else.
_LEAST_PROBED = 64 << 20
_HIDDEN = ("/home", "/root", "/run/user")


def checks(subject: Subject, *, probe: bool) -> list[Check]:
    found = [state_room(subject)] if subject.state_directory else []
    if subject.model is None:
        return found
    way = permissions(subject.model)
    found.append(way)
    if way.status == FAIL:
        return found
    found += [sandbox(subject.model), file_system(subject), read_ahead(subject)]
    return [*found, speed(subject.model)] if probe else found


def state_room(subject: Subject) -> Check:
    """Profiles are small, but must not be torn."""
    assert subject.state_directory is not None
    directory = subject.state_directory
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    why = "Profiles and traces are saved there; a full disk loses what was learned since the last save."
    value = f"{format_size(free)} free at {subject.state_directory}"
    if free < _LEAST_FREE:
        return Check("state_directory", WARN, value, why, "Make room, or set state.directory elsewhere.")
    return Check("state_directory", OK, value, why)


def permissions(model: Path) -> Check:
    """Walks to the file as this user, then asks whether a service's user could, by the bits for others."""
    why = "The daemon runs as a user of its own: each directory must let others through (x), the file be readable (r)."
    steps = _steps(Path(os.path.abspath(model)))
    for step, needed in steps:
        try:
            found = step.stat()
        except PermissionError:
            return _closed(step.parent, "cannot be entered by this user", why, "x")
        except OSError as error:
            return Check("path", FAIL, f"{step}: {error.strerror}", why, "Check the path's spelling.")
        if not os.access(step, os.X_OK if needed == "x" else os.R_OK):
            return _closed(step, "is closed to this user", why, needed)
        if not found.st_mode & (stat.S_IXOTH if needed == "x" else stat.S_IROTH):
            fix = f"chmod o+{needed} {step}, or run the service with a group that may (SupplementaryGroups=)."
            return Check("path", WARN, f"{step} is closed to other users ({stat.filemode(found.st_mode)})", why, fix)
    if not steps[-1][0].is_file():
        return Check("path", FAIL, f"{model} is not a file", why, "Give the GGUF file itself.")
    return Check("path", OK, f"{model} can be reached and read by all users", why)


def _closed(step: Path, what: str, why: str, needed: str) -> Check:
    return Check("path", FAIL, f"{step} {what}", why, f"chmod o+{needed} {step}")


def _steps(model: Path) -> list[tuple[Path, str]]:
    """Every directory down to the file, and behind it those of what it links to, with what each needs."""
    found = [(parent, "x") for parent in reversed(model.parents)]
    target = Path(os.path.realpath(model))
    if target != model:
        found += [(parent, "x") for parent in reversed(target.parents) if (parent, "x") not in found]
    return [*found, (target, "r")]


def sandbox(model: Path) -> Check:
    """The shipped unit hides home directories."""
    target = os.path.realpath(model)
    why = "The shipped unit sets ProtectHome=yes: the daemon sees no home directory."
    if any(target.startswith(f"{hidden}/") for hidden in _HIDDEN):
        fix = "Copy drop-ins/home-models.conf into expertd.service.d, or move the model, say to /srv/models."
        return Check("protect_home", WARN, target, why, fix)
    return Check("protect_home", OK, "the model lies in no home directory", why)


def file_system(subject: Subject) -> Check:
    """Whether its pages can be steered."""
    assert subject.model is not None
    found = disk.file_system(subject.model, subject.root)
    why = "Steering fetches and drops pages of the model in this machine's page cache."
    value = f"{found.kind} at {found.mount}"
    if not found.steerable:
        fix = "Move the model to a local ext4, xfs, btrfs or f2fs disk."
        return Check("file_system", WARN, f"{value}: {found.reason}", why, fix)
    if found.kind == "overlay":
        fix = "Mount the model from outside the container's image (a volume)."
        return Check("file_system", WARN, f"{value}: a container's layered file system", why, fix)
    return Check("file_system", OK, value, why)


def read_ahead(subject: Subject) -> Check:
    """How much the disk reads at each fault."""
    assert subject.model is not None
    limits = disk.read_limits(subject.model, subject.root)
    why = "A fault reads this much around it. Experts are fetched exactly, so more only pushes out what is needed."
    file = read_ahead_file(subject.model)
    if not limits.known:
        return Check("read_ahead", OK, "not shown by the device", why)
    if limits.read_ahead_kb > _LARGE_READ_AHEAD_KB:
        fix = f"echo 128 > {file} (until the next boot), or a udev rule."
        return Check("read_ahead", WARN, f"{limits.read_ahead_kb} KiB", why, fix)
    return Check("read_ahead", OK, f"{limits.read_ahead_kb} KiB", why)


def read_ahead_file(model: Path) -> Path:
    """The sysfs file that sets it for the device of a file."""
    device = os.stat(model).st_dev
    return Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")


def speed(model: Path) -> Check:
    """A short measurement past the page cache."""
    why = "What misses is read from this disk: at 80 % hits a 30B-A3B model reads about 150 MB a token."
    if model.stat().st_size < _LEAST_PROBED:
        return Check("disk_speed", OK, f"not measured: the file is below {format_size(_LEAST_PROBED)}", why)
    try:
        found = disk.probe(model, nbytes=128 << 20)
    except PagesError as error:
        return Check("disk_speed", OK, f"not measured: {error.message}", why)
    value = f"{found.sequential / 1e6:.0f} MB/s in order, {found.random / 1e6:.0f} MB/s in random 1 MiB blocks"
    if found.random < _SLOW:
        return Check(
            "disk_speed", WARN, value, why, "Put the model on an NVMe disk; no steering makes up for this one."
        )
    if found.random < _USABLE:
        return Check("disk_speed", OK, f"{value} (an NVMe disk would answer faster)", why)
    return Check("disk_speed", OK, value, why)
