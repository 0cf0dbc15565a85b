"""Sets a disk's read-ahead for the time of a benchmark. What it is, without changing it, is `pages.disk`'s to say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertd.errors import BenchError


@contextmanager
def read_ahead(path: Path, kib: int | None, root: Path = Path("/")) -> Iterator[None]:
    """While the context holds, the device under `path` reads `kib` ahead; None changes nothing. Raises BenchError."""
    if kib is None:
        yield
        return
    setting = _setting(path, root)
    before = setting.read_text().strip()
    try:
        setting.write_text(str(kib))
    except OSError as e:
        raise BenchError(f"cannot set {setting}: {e.strerror}", hint="run as root, or leave out --read-ahead") from e
    try:
        yield
    finally:
        setting.write_text(before)


def _setting(path: Path, root: Path) -> Path:
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    block = root / "sys/dev/block" / name
    for place in (block / "queue", block / ".." / "queue", root / "sys/class/bdi" / name):
        setting = place / "read_ahead_kb"
        if setting.exists():
            return setting
    raise BenchError(f"the device under {path} shows no read_ahead_kb", hint="leave out --read-ahead")
