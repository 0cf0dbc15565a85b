"""`expertd demo`: the main job on the built-in model, as a user would do it: serve, chat over HTTP, read the report.

Starts a real daemon in a process of its own on a free loopback port, with a budget below the model's expert bytes so
that misses and evictions happen, and with its state in a directory that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expertd.cli.client import DaemonClient
from expertd.errors import ExpertdError, NotReadyError
from expertd.units import format_size

if TYPE_CHECKING:
    import httpx

_QUESTION = "What is a mixture of experts?"
_READY_SECONDS = 120.0
_STOP_SECONDS = 20.0


class DemoError(ExpertdError):
    """The demo's own daemon did not start, answer or stop."""

    code = "demo"


def built_in_model() -> Path:
    """The tiny MoE that ships with the package."""
    return Path(str(resources.files("expertd") / "data" / "tiny-moe-q4_0.gguf"))


@click.command("demo")
@click.option("--prompt", default=_QUESTION, show_default=True, help="What to ask.")
@click.option("--budget", default="40%", show_default=True, help="Bytes of experts to hold.")
@click.option("--json", "as_json", is_flag=True, help="Print the reply and the cache report as JSON.")
def command(prompt: str, budget: str, as_json: bool) -> int:
    """Run the built-in tiny model end to end and print what the cache did."""
    with tempfile.TemporaryDirectory(prefix="expertd-demo-") as directory, _daemon(Path(directory), budget) as http:
        say: Callable[[str], None] = _quiet if as_json else _echo
        say(f"serving {built_in_model().name} at {http.base_url}, budget {budget} of its experts\n")
        say(f"\n> {prompt}\n")
        reply, last = _chat(http, prompt, say)
        report = http.get("/expertd/cache").json()
        if as_json:
            click.echo(json.dumps({"reply": reply, "timings": last.get("timings"), "cache": report}, indent=2))
        else:
            click.echo("\n" + "\n".join(report_lines(report, last)))
    if not reply:
        raise DemoError("the model gave no reply", hint="see the daemon's log above")
    return 0


@contextlib.contextmanager
def _daemon(directory: Path, budget: str) -> Iterator[httpx.Client]:
    """A serving daemon, ready; stopped at the end. Its log goes to standard error only if it fails."""
    import httpx

    log_path, socket = directory / "log", directory / "admin.sock"
    # Steering is forced: the model would fit any machine.
    arguments = [
        sys.executable, "-m", "expertd", "serve", "--model", str(built_in_model()), "--budget", budget,
        "--steering", "on", "--port", "0", "--socket", str(socket), "--ctx", "1024",
        "--set", f"state.directory={directory}",
    ]  # fmt: skip
    with log_path.open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=directory)
    try:
        with httpx.Client(base_url=_wait_ready(process, socket), timeout=60) as http:
            yield http
        process.terminate()
        code = process.wait(_STOP_SECONDS)
        if code:
            raise DemoError(f"the daemon exited with {code}")
    except BaseException:
        sys.stderr.write(log_path.read_text(errors="replace"))
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], socket: Path) -> str:
    """The daemon's URL, once it says that it is ready."""
    client = DaemonClient(socket, None, seconds=5)
    end = time.monotonic() + _READY_SECONDS
    try:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise DemoError(f"the daemon exited with {process.returncode} while starting")
            with contextlib.suppress(NotReadyError):
                status = client.get("/expertd/status")
                if status["state"] == "ready":
                    return str(status["url"])
            time.sleep(0.05)
    finally:
        client.close()
    raise DemoError(f"the daemon was not ready within {_READY_SECONDS:.0f} s")


def _quiet(_text: str) -> None:
    """For --json: the reply is part of the document."""


def _echo(text: str) -> None:
    click.echo(text, nl=False)


def _chat(http: httpx.Client, prompt: str, say: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """The reply, said as it comes, and the last chunk (with timings)."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0, "max_tokens": 120,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    reply = ""
    last: dict[str, Any] = {}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise DemoError(f"the daemon answered {answer.status_code}: {answer.text[:200]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise DemoError(f"the daemon failed in the answer: {chunk['error'].get('message')}")
            last = {**last, **{k: chunk[k] for k in ("timings", "expertd", "usage") if k in chunk}}
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                reply += text
                say(text)
    say("\n")
    return reply, last


def report_lines(report: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """The cache report for a person, by layer."""
    experts, timings = report["experts"], last.get("timings") or {}
    rows = [
        f"prompt     {timings.get('prompt_n', 0)} tokens at {timings.get('prompt_per_second', 0):.0f} tok/s",
        f"reply      {timings.get('predicted_n', 0)} tokens at {timings.get('predicted_per_second', 0):.0f} tok/s",
        f"budget     {format_size(report['budget_bytes'])} (policy {report['policy']})",
        f"requests   {report['requests']}: {report['hits']} hits, {report['misses']} misses "
        f"({100 * report['hit_ratio']:.1f} % hits), {report['evictions']} evictions",
        f"bytes read {format_size(report['bytes_read'])} for experts",
        f"resident   {experts['resident']} of {experts['total']} experts, {format_size(report['resident_bytes'])}; "
        f"pinned {format_size(report['pinned_bytes'])}",
        "",
        "layer  requests   hits  misses  hit ratio  resident",
    ]
    for layer in report["layers"]:
        rows.append(
            f"{layer['layer']:>5}  {layer['requests']:>8}  {layer['hits']:>5}  {layer['misses']:>6}  "
            f"{100 * layer['hit_ratio']:>7.1f} %  {layer['resident']:>4}/{layer['experts']}"
        )
    return rows
