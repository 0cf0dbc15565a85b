"""A real Prometheus scrapes a running daemon: every expression of rules, alerts and dashboard gives data.

Uses Debian's package prometheus. The rules' windows are minutes; here they are shortened to what a test can wait for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).resolve().parents[2] / "config"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        assert time.monotonic() < end, "did not come in time"
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(20)


@pytest.fixture(scope="module")
def daemon(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running daemon whose budget makes experts come and go."""
    directory, port = tmp_path_factory.mktemp("daemon"), free_port()
    settings = ["server.socket=", f"state.directory={directory}", "engine.n_ctx=512", "engine.threads=1"]
    command = [sys.executable, "-m", "expertd", "serve", "--model", str(demo_model), "--port", str(port)]
    command += ["--budget", "1MiB", "--steering", "on", *(part for s in settings for part in ("--set", s))]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"EXPERTD_CONFIG": os.devnull})
    wait_for(lambda: get(f"http://127.0.0.1:{port}/readyz"), 60)
    yield f"127.0.0.1:{port}"
    stop(process)


@pytest.fixture(scope="module")
def prometheus(daemon: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes it four times a second with the shipped rules."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus (Debian's package prometheus)")
    directory, port = tmp_path_factory.mktemp("prometheus"), free_port()
    for name in ("rules.yml", "alerts.yml"):
        (directory / name).write_text(shortened((CONFIG / "prometheus" / name).read_text()))
    scrape = (CONFIG / "prometheus" / "scrape.yml").read_text()
    scrape = scrape.replace("127.0.0.1:8642", daemon).replace("scrape_interval: 5s", "scrape_interval: 250ms")
    text = f"global: {{evaluation_interval: 500ms}}\nrule_files: [rules.yml, alerts.yml]\n{scrape}"
    (directory / "prometheus.yml").write_text(text)
    options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
    wait_for(lambda: get(f"http://127.0.0.1:{port}/api/v1/status/runtimeinfo"), 60)
    yield f"http://127.0.0.1:{port}"
    stop(process)


def shortened(text: str) -> str:
    return re.sub(r"\[\d+m\]", "[5s]", text)


def query(prometheus: str, expression: str) -> list[Any]:
    answer = get(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    assert answer["status"] == "success"
    return list(answer["data"]["result"])


def ask(daemon: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{daemon}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 48


def expressions() -> list[str]:
    rules = re.findall(r"record: (\S+)", (CONFIG / "prometheus" / "rules.yml").read_text())
    dashboard = json.loads((CONFIG / "grafana" / "expertd.json").read_text())
    panels = [t["expr"].replace("$instance", ".*") for p in dashboard["panels"] for t in p["targets"]]
    return rules + panels


def test_every_expression_gives_data(daemon: str, prometheus: str) -> None:
    # No warm-up is asked for here, and a share of nothing is no data.
    wanted = [e for e in expressions() if "warmup" not in e]
    if not Path("/proc/pressure/memory").exists():
        wanted = [e for e in wanted if "memory_stall" not in e]
    missing = wanted
    end = time.monotonic() + 40
    while missing and time.monotonic() < end:
        ask(daemon)
        time.sleep(0.5)
        missing = [e for e in missing if not query(prometheus, shortened(e))]
    assert missing == []


def test_the_rules_were_evaluated_without_errors(prometheus: str) -> None:
    groups = get(f"{prometheus}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(
        re.findall(r"- (?:record|alert):", "".join(p.read_text() for p in (CONFIG / "prometheus").iterdir()))
    )
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"} == {}
    firing = [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"]
    assert firing == []


def test_counters_agree_with_the_cache_report(daemon: str, prometheus: str) -> None:
    ask(daemon)
    report = get(f"http://{daemon}/expertd/cache")

    def scraped() -> bool:
        samples = query(prometheus, "expertd_cache_requests_total")
        found = {s["metric"]["result"]: float(s["value"][1]) for s in samples}
        return found == {"hit": report["hits"], "miss": report["misses"]}

    assert wait_for(scraped, 10)


def test_a_scrape_does_not_wait_for_the_engine(daemon: str) -> None:
    """While a request is being generated, scrapes are answered and show it in flight."""
    body = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://{daemon}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        with urllib.request.urlopen(f"http://{daemon}/metrics", timeout=30) as scrape:
            text = scrape.read().decode()
    assert re.search(r"^expertd_requests_in_flight 1.0$", text, re.MULTILINE)
