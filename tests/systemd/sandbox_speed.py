"""What the shipped sandbox costs: the same decode with it and without, in turn.

    python -m tests.systemd.sandbox_speed --root DIRECTORY [--rounds 6] [--tokens 300] [--budget 25%]

In the container of `nspawn.py`: `make install`, then rounds of two starts. One is `systemctl start expertd`, the unit
as shipped; the other a transient service with the same executable and configuration, as an ordinary user and with
nothing but the limit on locked memory. Each is warmed by one request and then timed by its own account of the decode,
three requests a start; who comes first changes from round to round. The experts' budget is below their size, so that
tokens make the system calls that a filter would slow down. A container's own filter is in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.systemd.container import Container, Failed, expect, free_port, make_root
from tests.systemd.nspawn import MAKE, prepare
from tests.systemd.wheels import pack_all

REQUESTS = 3
PROMPTS = ("Once upon a time", "The capital of France", "A mixture of experts is")
OPEN_UNIT = "expertd-open"
OPEN = [
    "systemd-run", "--quiet", f"--unit={OPEN_UNIT}", "--service-type=notify",
    *(f"--property={p}" for p in (
        "User=nobody", "Group=expertd-admin", "LimitMEMLOCK=infinity",
        f"StateDirectory={OPEN_UNIT}", f"RuntimeDirectory={OPEN_UNIT}",
    )),
    "/usr/local/bin/expertd", "serve",
]  # fmt: skip
ARMS = {"sandbox": (["systemctl", "start", "expertd"], "expertd"), "open": (OPEN, OPEN_UNIT)}


class Measurement:
    """Of one installed daemon. `rates` are tokens a second, by arm; `words` what was said."""

    def __init__(self, root: Path, box: Container, budget: str, n_tokens: int) -> None:
        self._box, self._n_tokens, self._port = box, n_tokens, free_port()
        self.rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.misses: dict[str, int] = dict.fromkeys(ARMS, 0)
        self.words: dict[str, str] = {}
        text = f"""
[model]
path = "/srv/models/tiny.gguf"
[engine]
n_ctx = 1024
threads = 1
[cache]
steering = "on"
budget = "{budget}"
[server]
port = {self._port}
"""
        (root / "etc/expertd/expertd.toml").write_text(text)

    def one(self, arm: str) -> None:
        """A start, its requests, a stop."""
        command, unit = ARMS[arm]
        self._box.run(*command)
        try:
            self._wait_ready()
            self._ask(PROMPTS[0])
            for prompt in PROMPTS[:REQUESTS]:
                told = self._ask(prompt)
                self.rates[arm].append(told["timings"]["predicted_per_second"])
                self.misses[arm] += told["expertd"]["expert_requests"] - told["expertd"]["expert_hits"]
                text = told["choices"][0]["text"]
                expect(self.words.setdefault(prompt, text) == text, "the arms say different words")
            (uid,) = self._box.run("ps", "-o", "uid=", "-p", self._box.show(unit, "MainPID")[0]).split()
            expect(uid != "0", "it runs as root")
        finally:
            self._box.run("systemctl", "stop", unit, check=False)
            self._box.run("systemctl", "reset-failed", unit, check=False)

    def _wait_ready(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=30) as answer:
            expect(answer.status == 200, "not ready although started")

    def _ask(self, prompt: str) -> Any:
        body = {
            "prompt": prompt, "max_tokens": self._n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def report(self) -> dict[str, Any]:
        medians = {arm: statistics.median(rates) for arm, rates in self.rates.items()}
        pairs = [shut / free for shut, free in zip(self.rates["sandbox"], self.rates["open"], strict=True)]
        return {
            "tokens_per_second": {arm: [round(r, 1) for r in rates] for arm, rates in self.rates.items()},
            "median": {arm: round(median, 1) for arm, median in medians.items()},
            "misses": self.misses,
            # The same prompt of the same round: prompts differ in speed more than the arms do.
            "sandbox_to_open": {
                "quartiles": [round(q, 3) for q in statistics.quantiles(pairs, n=4)],
                "pairs": len(pairs),
            },
        }


def measure(root: Path, wheels: Path, rounds: int, budget: str, n_tokens: int) -> dict[str, Any]:
    """Installs, measures, powers off."""
    prepare(root)
    box = Container(root, wheels)
    try:
        box.run(*MAKE, "install")
        measurement = Measurement(root, box, budget, n_tokens)
        for number in range(rounds):
            arms: Sequence[str] = list(ARMS) if number % 2 == 0 else list(reversed(ARMS))
            for arm in arms:
                measurement.one(arm)
        box.run(*MAKE, "uninstall")
        return measurement.report()
    finally:
        box.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="Where the container is made, and kept.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--budget", default="25%")
    given = parser.parse_args()
    given.root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        try:
            make_root(given.root)
            pack_all(wheels)
            print(json.dumps(measure(given.root, wheels, given.rounds, given.budget, given.tokens), indent=2))
        except Failed as error:
            print(f"FAIL  {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
