"""Chaos: a daemon that is killed, starved, filled up and besieged, and must serve afterwards as before.

    python -m tests.chaos.chaos [--kills 50] [--seed 7] [--connections 500] [--only kills,memory,disk,clock,clients]

A line for each step, a summary at the end; exits 1 where something does not hold. As root all of it is done; otherwise
what cannot be done is named. The built-in model, one daemon at a time with one thread, everything in a temporary
directory.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import httpx

from expertd.bench import inflate
from tests.chaos import troubles
from tests.chaos.kills import MOMENTS, Kills
from tests.chaos.subject import Violation, subject

HOG_MODEL_NBYTES = 200 << 20
HOG_LIMIT_NBYTES = 480 << 20
"""Room for the daemon and its budget, and some hundred MB for the hog to take."""


def built_in() -> Path:
    return Path(str(resources.files("expertd") / "data" / "tiny-moe-q4_0.gguf"))


class Chaos:
    """A run: what was done, and what did not hold."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._dice = directory, random.Random(seed)
        self.violations: list[str] = []
        self.skipped: list[str] = []
        self.summary: list[str] = []
        self.n_steps = 0

    def step(self, name: str, work: Callable[[], str]) -> bool:
        """Does it and says how it went."""
        began = time.monotonic()
        self.n_steps += 1
        try:
            line = f"ok    {name}: {work()}"
        except troubles.Skipped as reason:
            self.skipped.append(name)
            line = f"skip  {name}: {reason}"
        except (Violation, httpx.HTTPError) as error:
            self.violations.append(name)
            line = f"FAIL  {name}: {type(error).__name__}: {error}"
        print(f"{line} ({time.monotonic() - began:.1f} s)", flush=True)
        return not line.startswith("FAIL")

    def reference(self, model: Path) -> tuple[str, str]:
        """What an undisturbed daemon says."""
        with subject(model, self._directory / "reference") as daemon:
            daemon.start()
            words = daemon.answers()
            daemon.stop()
        return words

    def kills(self, reference: tuple[str, str], moments: Iterator[str]) -> None:
        """One daemon, killed at each of the moments and started again each time."""
        done = Counter[str]()
        with subject(built_in(), self._directory / "kills") as daemon:
            daemon.start()
            daemon.sound(reference)
            kills = Kills(daemon, reference, self._dice)
            for number, moment in enumerate(moments, 1):
                if not self.step(f"kill {number} in {moment}", lambda at=moment: kills.one(at)):  # type: ignore[misc]
                    break
                done[moment] += 1
            else:
                self.step("end after the kills", lambda: self._ended(kills))
        counts = ", ".join(f"{n} in {moment}" for moment, n in sorted(done.items()))
        self.summary.append(f"{kills.n_kills} kills ({counts}), {kills.n_half_written} with a half-written profile")

    @staticmethod
    def _ended(kills: Kills) -> str:
        daemon = kills.daemon
        daemon.stop()
        left = [path.name for path in daemon.profile_files()]
        if sorted(left) != [".lock", "default.profile"]:
            raise Violation(f"left in the state directory: {left}")
        return f"{daemon.starts} starts, {daemon.profiles()['default']} tokens in the profile, nothing else left"


def moments(n: int, dice: random.Random) -> Iterator[str]:
    """Each moment as often as the others, in random order."""
    names = [list(MOMENTS)[i % len(MOMENTS)] for i in range(n)]
    dice.shuffle(names)
    return iter(names)


def run(directory: Path, n_kills: int, seed: int, n_connections: int, only: set[str], *, small: bool = False) -> Chaos:
    """The whole of it, or the phases in `only`. `small`: the memory hog beside the built-in model as it is, and no
    connections that take a minute to be ended."""
    chaos, model = Chaos(directory, seed), built_in()
    reference = chaos.reference(model)
    print(f"reference: {reference}", flush=True)
    if "kills" in only:
        chaos.kills(reference, moments(n_kills, random.Random(seed)))
    if "memory" in only:
        big, words = model, reference
        if not small:
            big = directory / "big.gguf"
            inflate.write(inflate.plan(HOG_MODEL_NBYTES), big)
            words = chaos.reference(big)
        chaos.step("memory hog", lambda: troubles.memory_hog(big, directory / "memory", words, HOG_LIMIT_NBYTES))
    if "disk" in only:
        chaos.step("full disk", lambda: troubles.full_disk(model, directory / "disk", reference))
    if "clock" in only:
        chaos.step("clock jumps", lambda: troubles.clock_jumps(model, directory / "clock", reference))
    if "clients" in only:
        at = directory / "clients"
        chaos.step(
            "unfinished requests",
            lambda: troubles.never_finished(model, at, reference, n_connections, bodies=not small),
        )
        siege = directory / "siege"
        chaos.step("siege", lambda: troubles.besieged(model, siege, reference, n_connections))
    return chaos


PHASES = ("kills", "memory", "disk", "clock", "clients")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--only", default=",".join(PHASES), help="Phases, by comma.")
    given = parser.parse_args()
    only = set(given.only.split(","))
    if only - set(PHASES):
        parser.error(f"--only: one of {', '.join(PHASES)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="expertd-chaos-") as directory:
        chaos = run(Path(directory), given.kills, given.seed, given.connections, only)
    for line in chaos.summary:
        print(line)
    verdict = "violated: " + ", ".join(chaos.violations) if chaos.violations else "nothing violated"
    skipped = f", skipped: {', '.join(chaos.skipped)}" if chaos.skipped else ""
    print(f"{chaos.n_steps} steps in {time.monotonic() - began:.0f} s: {verdict}{skipped}")
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main())
