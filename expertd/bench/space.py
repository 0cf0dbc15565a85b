"""Where a benchmark puts its large files, and whether there is room for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from expertd.errors import BenchError, UsageError
from expertd.pages.disk import file_system
from expertd.units import format_size

DEFAULT_DIR = Path("/var/tmp/expertd-bench")
"""On disk by the file hierarchy standard, where /tmp may be memory."""
_RESERVE_NBYTES = 1 << 30


def directory(path: Path) -> Path:
    """`path`, made if need be. Raises BenchError when it cannot be, UsageError when its files would lie in memory."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BenchError(f"cannot make {path}: {e.strerror}", hint="choose another --dir") from e
    kind = file_system(path).kind
    if kind in ("tmpfs", "ramfs"):
        raise UsageError(
            f"{path} is {kind}: its files lie in memory, there is nothing to read from a disk",
            hint="choose a --dir on a disk",
        )
    return path


def check_room(path: Path, nbytes: int) -> None:
    """Raises BenchError when `nbytes` and a reserve of 1 GiB do not fit beside what is in the directory."""
    free = shutil.disk_usage(path).free
    if free < nbytes + _RESERVE_NBYTES:
        raise BenchError(
            f"{path} has {format_size(free)} free, the model takes {format_size(nbytes)} and 1 GiB must stay free",
            hint="choose another --dir, or fewer --layers",
        )
