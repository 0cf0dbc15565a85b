"""Settles how libgomp's threads wait, before it is loaded: afterwards it reads no environment any more.

llama.cpp's threads meet at a barrier after every operation and spin there. Where two of them land on one core while
another thread of this process (HTTP, evictions) runs on the second, each barrier costs a scheduler's time slice: the
built-in model fell from 4 to 1,400 ms a token on a busy two-core machine. Bound to a core each they cannot meet. Where
fewer threads than cores were asked for there is slack, and binding would only make two daemons collide on the first
cores, so nothing is bound then.

libgomp binds the thread that loads it as well, and every thread inherits the binding of its maker: so it is loaded
here, and the loading thread is let loose again. What the user has set stays.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping

from expertd.engine.settings import physical_cores

_SET_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def load(threads: int = 0, env: MutableMapping[str, str] = os.environ) -> bool:
    """Imports llama_cpp, its threads bound one a core where `threads` (0: all physical cores) fill the machine.

    Whether they are bound: not where the user has settled it, nor where llama_cpp was loaded before.
    """
    cores = os.sched_getaffinity(0)
    # numpy's matmuls here are small; its own threads would meet llama.cpp's on the same cores.
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    bind = "llama_cpp" not in sys.modules and not any(name in env for name in _SET_BY_USER)
    bind = bind and (not threads or threads >= physical_cores())
    if bind:
        env["OMP_PROC_BIND"] = "true"
        env["OMP_PLACES"] = "cores"
    importlib.import_module("llama_cpp")
    os.sched_setaffinity(0, cores)
    return bind
