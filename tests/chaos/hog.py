"""Takes memory until it is killed, or up to `--bytes` and then holds it for `--seconds`. Touches every page."""

from __future__ import annotations

import argparse
import mmap
import time
from pathlib import Path

STEP_NBYTES = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 50)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    # The kernel, when it must kill, is to take this and not who happens to run beside it.
    Path("/proc/self/oom_score_adj").write_text("1000")
    held: list[mmap.mmap] = []
    while len(held) * STEP_NBYTES < given.bytes:
        block = mmap.mmap(-1, STEP_NBYTES)
        for offset in range(0, STEP_NBYTES, mmap.PAGESIZE):
            block[offset] = 1
        held.append(block)
        time.sleep(0.02)
    time.sleep(given.seconds)


if __name__ == "__main__":
    main()
