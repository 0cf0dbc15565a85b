"""The three forms of a log line, and that nothing from outside can forge one."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from expertd.telemetry import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)


def test_journal_lines_carry_priorities_and_no_time(stream: io.StringIO) -> None:
    logs.set_up("debug", "journal", {}, stream)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logging.getLogger("expertd.pages.pager").log(level, "line of %s", level)
    assert stream.getvalue().splitlines() == [
        "<7>pages: line of 10",
        "<6>pages: line of 20",
        "<4>pages: line of 30",
        "<3>pages: line of 40",
        "<2>pages: line of 50",
    ]


def test_every_line_of_a_traceback_has_its_priority(stream: io.StringIO) -> None:
    logs.set_up("info", "journal", {}, stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("expertd.engine").exception("it failed")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "<3>engine: it failed"
    assert lines[-2:] == ["<3>engine: ValueError: two", "<3>engine: lines"]
    assert all(line.startswith("<3>engine: ") for line in lines)


def test_text_is_for_people(stream: io.StringIO) -> None:
    logs.set_up("info", "text", {}, stream)
    logging.getLogger("expertd.server").warning("first\nsecond")
    first, second = stream.getvalue().splitlines()
    assert first[4] == "-"
    assert first[19:] == " WARNING server: first"
    assert second == "  second"


def test_json_is_one_object_a_line_with_the_fields(stream: io.StringIO) -> None:
    logs.set_up("info", "json", {}, stream)
    fields = {"tokens": 12, "hit_ratio": 0.5, "message": "not this"}
    logging.getLogger("expertd.server").info("answered\n%s", "é\x9b", extra={"fields": fields})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["source"], entry["message"]) == ("info", "server", "answered\né\x9b")
    assert (entry["tokens"], entry["hit_ratio"]) == (12, 0.5)
    assert entry["time"].endswith("Z")
    assert line.isascii()


@pytest.mark.parametrize("form", ["text", "journal"])
def test_what_comes_from_outside_cannot_forge_a_line_or_move_the_cursor(stream: io.StringIO, form: str) -> None:
    logs.set_up("info", form, {}, stream)
    logging.getLogger("expertd.server").info("model %s", "x\r\x1b[2J\x00\n<0>kernel: panic")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(r"model x\r\x1b[2J\x00")
    assert second == ("  <0>kernel: panic" if form == "text" else "<6>server: <0>kernel: panic")


def test_llama_and_uvicorn_are_in_the_same_stream_and_the_chatty_are_quiet(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())
    logs.set_up("info", "journal", {}, stream)
    logging.getLogger("expertd.llama").warning("out of memory")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.error").warning("odd request")
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("httpx").info("HTTP Request")
    assert stream.getvalue().splitlines() == ["<4>llama: out of memory", "<4>uvicorn: odd request"]


def test_the_level_can_change_while_running(stream: io.StringIO) -> None:
    logs.set_up("warning", "journal", {}, stream)
    logging.getLogger("expertd.cache").info("not seen")
    logs.set_level("debug")
    logging.getLogger("expertd.cache").debug("seen")
    assert stream.getvalue() == "<7>cache: seen\n"


def test_auto_is_journal_only_for_the_journals_own_stream() -> None:
    script = (
        "import os, sys, logging; from expertd.telemetry import logs; s = os.fstat(2)\n"
        "env = {'JOURNAL_STREAM': sys.argv[1] or f'{s.st_dev}:{s.st_ino}'}\n"
        "logs.set_up('info', 'auto', env); logging.getLogger('expertd.x').info('here')"
    )
    for named, journal in (("", True), ("8:1", False)):
        done = subprocess.run([sys.executable, "-c", script, named], capture_output=True, text=True, check=True)
        assert done.stderr.startswith("<6>x: here") == journal


def test_an_error_that_nobody_caught_is_logged(stream: io.StringIO) -> None:
    logs.set_up("info", "journal", {}, stream)
    thread = threading.Thread(target=lambda: os.stat("/nonexistent/x"), name="pager")
    thread.start()
    thread.join()
    assert stream.getvalue().splitlines()[0] == "<3>expertd: thread pager ended by an error"
    sys.excepthook(RuntimeError, RuntimeError("boom"), None)
    assert "<2>expertd: unexpected RuntimeError: boom" in stream.getvalue()
