"""What one viewer of the dashboard costs: `python tests/dashboard/cost.py [--seconds 30]` prints a table as JSON.

Makes a model of 94 layers x 128 experts, serves it with a budget that makes experts come and go, and compares, while it
answers requests and while it does not, the daemon with no viewer and with Chromium at its dashboard. `loop` is the
share of one core that the event loop's thread uses (it alone serves the page), `page` that of the page's own thread in
the browser. CPU time, so other work on the machine disturbs it little; tokens are by the clock and are disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver

from expertd.bench import synth
from expertd.bench.geometry import Geometry

GEOMETRY = Geometry("wide-94x128", "qwen3moe", 94, 128, 8, 256, 64, 4, 2, 64, 512)
PORT = 8759
URL = f"http://127.0.0.1:{PORT}"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as pid, chromium(Path(name)) as browser:
        rows = []
        for busy, viewed in itertools.product((False, True), (False, True)):
            browser.get(f"{URL}/" if viewed else "about:blank")
            with asking() if busy else contextlib.nullcontext():
                time.sleep(5)
                rows.append({"busy": busy, "viewed": viewed, **measure(pid, browser, seconds)})
        print(json.dumps(rows, indent=1))


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[int]:
    model = directory / "wide.gguf"
    synth.write(GEOMETRY, model)
    command = [
        sys.executable, "-m", "expertd", "serve", "--model", str(model), "--budget", "10%", "--steering", "on",
        "--port", str(PORT), "--ctx", "1024", "--threads", "1", "--socket", str(directory / "admin.sock"),
        "--set", f"state.directory={directory}",
    ]  # fmt: skip
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/readyz"):
                break
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def chromium(directory: Path) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={directory / 'chromium'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    yield driver
    driver.quit()


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Requests with random words without a break, so that experts are missed all the time."""
    end, chance = threading.Event(), random.Random(1)

    def ask() -> None:
        while not end.is_set():
            prompt = "".join(chance.choice("etaoinshrdlucmfwyp ") for _ in range(8))
            body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 2.0}
            request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode())
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request) as answer:
                answer.read()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def measure(pid: int, browser: Any, seconds: float) -> dict[str, float]:
    def look() -> tuple[float, float, float, float]:
        with urllib.request.urlopen(f"{URL}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        tokens = next(line for line in lines if line.startswith("expertd_generated_tokens_total "))
        used = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
        metrics = {m["name"]: m["value"] for m in browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
        return time.monotonic(), used, metrics["TaskDuration"], float(tokens.split()[1])

    before = look()
    time.sleep(seconds)
    spent, loop, page, tokens = (b - a for a, b in zip(before, look(), strict=True))
    return {
        "loop_percent": round(100 * loop / spent, 3),
        "page_percent": round(100 * page / spent, 3),
        "tokens_per_second": round(tokens / spent, 2),
    }


if __name__ == "__main__":
    main()
