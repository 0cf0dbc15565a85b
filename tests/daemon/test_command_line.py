"""The command line answers at once: asking any verb for help imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from expertd.cli import VERBS

_HEAVY = ("numpy", "llama_cpp", "rich", "starlette", "uvicorn", "httpx", "prometheus_client", "matplotlib", "gguf")
_LOOK = """
import contextlib, io, json, sys
from expertd.cli import run
said = io.StringIO()
with contextlib.redirect_stdout(said):
    code = run(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted(m for m in sys.modules if "." not in m), "said": said.getvalue()}))
"""


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS)], ids=lambda v: v[0] if v else "expertd")
def test_help_imports_nothing_heavy(verb: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, *verb, "--help"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["code"] == 0
    assert "Usage: expertd" in found["said"]
    assert not set(_HEAVY) & set(found["modules"])


def test_the_demo_runs_end_to_end_with_misses_and_evictions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "expertd", "demo", "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cache = found["cache"]
    assert "mixture of experts" in found["reply"]
    assert cache["misses"] > 0
    assert cache["evictions"] > 0
    assert cache["hits"] > 0
    assert cache["bytes_read"] > 0
    assert len(cache["layers"]) == 8


def test_version_names_what_a_report_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "expertd", "version", "--json"], capture_output=True, text=True, check=True, timeout=30
    )
    assert {"expertd", "llama-cpp-python", "python", "kernel"} <= set(json.loads(done.stdout))
