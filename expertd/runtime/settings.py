"""What the runtime is told at its start, resolved from the configuration by `daemon`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertd.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Sizes are bytes. `budget` None follows the machine; `budget_share` is a share of the expert bytes instead.
    `state` None keeps nothing on disk."""

    engine: EngineSettings
    alias: str = ""
    steering: str = "auto"
    budget: int | None = None
    budget_share: float | None = None
    policy: str = "auto"
    half_life: float = 0.0
    pin_budget: int | None = None
    pin_budget_share: float | None = None
    reserve: int | None = None
    lock_dense: bool = True
    warm_level: str = "profile"
    ready_requires: str = "loaded"
    profile: str = "default"
    save_seconds: float = 300.0
    max_queue: int = 16
    order: str = "arrival"
    request_seconds: float = 0.0
    hang_seconds: float = 120.0
    """How long the engine may stand still before the daemon ends; 0 is for ever."""
    state: Path | None = None
    trace: bool = False
    """Whether routes are recorded from the start; into `trace_path`, else into the state directory."""
    trace_path: Path | None = None
    trace_bytes: int = 256 << 20
