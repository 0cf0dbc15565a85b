"""A real daemon as a process that can be ended and started again on its port, and Debian's Chromium to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGET = "40%"
WAIT_SECONDS = 90.0


def wait_for(condition: Callable[[], Any], what: str = "", seconds: float = WAIT_SECONDS) -> Any:
    """The condition's first true value. Connections refused meanwhile count as not yet."""
    end = time.monotonic() + seconds
    found = None
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            found = condition()
            if found:
                return found
        time.sleep(0.1)
    raise AssertionError(f"{what or 'it'} did not come in time; last: {found!r}")


class Daemon:
    """`expertd serve` on the built-in model, with a budget that makes experts come and go."""

    def __init__(self, model: Path, directory: Path, *settings: str, steering: str = "on") -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        self.directory, self.socket = directory, directory / "admin.sock"
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = [
            sys.executable, "-m", "expertd", "serve", "--model", str(model), "--budget", BUDGET, "--steering", steering,
            "--port", str(self.port), "--socket", str(self.socket), "--ctx", "512", "--threads", "1",
            *(part for setting in (f"state.directory={directory}", *settings) for part in ("--set", setting)),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log)
        wait_for(self._ready, "the daemon")

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)
            self._process = None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Requests without a break while the context lasts."""
        end = threading.Event()

        def ask() -> None:
            body = {"prompt": "What is a mixture of experts?", "max_tokens": 60, "ignore_eos": True}
            request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
            request.add_header("content-type", "application/json")
            while not end.is_set():
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(60)


@pytest.fixture(scope="session")
def make_daemon(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Daemon]:
    return lambda *settings, **options: Daemon(demo_model, tmp_path_factory.mktemp("daemon"), *settings, **options)


@pytest.fixture(scope="module")
def daemon(make_daemon: Callable[..., Daemon]) -> Iterator[Daemon]:
    """One for a module."""
    made = make_daemon()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def waiting() -> Callable[..., Any]:
    return wait_for


FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests; see `page` for what it is given back as."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    os.environ.setdefault("SE_AVOID_STATS", "true")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


class Page:
    """The dashboard in the browser, in few words."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(f"{url}/")
        wait_for(lambda: self.text("state") not in ("", "connecting"), "the first answer")

    def find(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        """Also of what is hidden."""
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).textContent", name))

    def shown(self, name: str) -> bool:
        return bool(self.find(name).is_displayed())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def colours(self, selector: str = "#map") -> dict[str, int]:
        """How many pixels of a canvas have each colour, most frequent first."""
        return dict(self.run(_COLOURS, selector))

    def pixels(self, selector: str = "#map") -> str:
        """The canvas as a data URL: equal pictures are equal texts."""
        return str(self.run("return document.querySelector(arguments[0]).toDataURL()", selector))

    def media(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        scale = 2 if phone else 1
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def complaints(self) -> list[str]:
        """What the browser's console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


_COLOURS = """
const canvas = document.querySelector(arguments[0]);
const copy = document.createElement("canvas");
Object.assign(copy, { width: canvas.width, height: canvas.height });
// The page's own canvas is not read from: the browser would complain, and draw it otherwise from then on.
const pen = copy.getContext("2d", { willReadFrequently: true });
pen.drawImage(canvas, 0, 0);
const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
const counts = new Map();
for (let i = 0; i < data.length; i += 4) {
  const name = data[i + 3] ? `${data[i]},${data[i + 1]},${data[i + 2]}` : "none";
  counts.set(name, (counts.get(name) || 0) + 1);
}
return [...counts].sort((a, b) => b[1] - a[1]);
"""


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """A fresh page: no storage, a dark desktop."""
    made = Page(chromium)
    made.size(1280, 900)
    made.media("dark")
    made.complaints()
    yield made
    with contextlib.suppress(Exception):
        made.run("sessionStorage.clear(); localStorage.clear()")
    chromium.get("about:blank")
