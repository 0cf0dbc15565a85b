"""One finding, and the files it is read from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """`id` is stable, `value` what was found, `why` why it matters, `fix` what to do (empty where all is well)."""

    id: str
    status: str
    value: str
    why: str
    fix: str = ""

    def json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined. `root` is where /proc and /sys lie (another in tests); `model` None leaves its checks out."""

    model: Path | None = None
    state_directory: Path | None = None
    threads: int = 0
    budget_nbytes: int | None = None
    steering: str = "auto"
    load: str = "lazy"
    lock_dense: bool = True
    n_gpu_layers: int = 0
    root: Path = Path("/")


def text(path: Path) -> str:
    """A small file's text without the ends; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
