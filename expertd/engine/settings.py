"""How the model is loaded and run. Values are checked where they come in (config); here they only have meanings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""ggml_type numbers of the element types that llama.cpp's KV cache takes."""
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`threads` 0 is one a physical core that this process may use; `n_batch` and `n_ubatch` 0 choose by the model."""

    model: Path
    n_ctx: int = 4096
    n_batch: int = 0
    n_ubatch: int = 0
    threads: int = 0
    threads_batch: int = 0
    kv_type: str = "f16"
    flash_attention: str = "auto"
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0
    override_tensor: tuple[str, ...] = ()
    lazy_load: bool = True
    repack: bool = False
    """llama.cpp's use_extra_bufts: weights are copied into anonymous memory in a faster layout; never when steering."""
    prompt_cache_nbytes: int = 0
    """Memory for conversations that are not the running one."""


def physical_cores() -> int:
    """Physical cores among those this process may run on; at least 1."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            text = str(cpu)
        cores.add(text.strip())
    return max(1, len(cores))
