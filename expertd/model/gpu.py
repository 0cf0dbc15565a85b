"""Which GPUs there are and how much of their memory is free, as nvidia-smi says.

Not here: what goes on them (`offload`).
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_nbytes: int
    free_nbytes: int


def read_gpus(timeout_seconds: float = 5.0) -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where nvidia-smi is absent, fails or does not answer in time."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=timeout_seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in done.stdout.splitlines():
        name, *sizes = (field.strip() for field in line.rsplit(",", 2))
        if len(sizes) == 2 and all(s.isdigit() for s in sizes):
            found.append(Gpu(name, int(sizes[0]) * _MIB, int(sizes[1]) * _MIB))
    return tuple(found)
