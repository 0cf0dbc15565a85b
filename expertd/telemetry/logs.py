"""One stream of lines on standard error, for people, for journald, or as JSON.

Everything goes through the standard library's loggers: this daemon's, uvicorn's, and llama.cpp's (which `engine.model`
hands to the logger expertd.llama). What is logged is decided where it happens; never a prompt, never a key.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

FORMATS = ("auto", "text", "journal", "json")
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# Chatty at their own INFO level, with what our own lines say better.
_QUIET = ("asyncio", "httpx", "httpcore", "uvicorn.access", "uvicorn.error", "urllib3")
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def set_up(level: str, form: str, env: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> None:
    """Send all logging to `stream` (standard error) in this form from now on. May be called again."""
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(form if form != "auto" else _detect(env, target)))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(True)
    sys.excepthook = _excepthook
    threading.excepthook = _thread_excepthook
    set_level(level)


def set_level(level: str) -> None:
    """The least important level shown; a reload calls it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.DEBUG if number == logging.DEBUG else logging.WARNING)


def _detect(env: Mapping[str, str], stream: TextIO) -> str:
    """journal where the stream is the journal's socket: JOURNAL_STREAM names its device and inode, and is inherited by
    children whose output goes elsewhere."""
    named = env.get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return "text"
    return "journal" if named == f"{found.st_dev}:{found.st_ino}" else "text"


def _formatter(form: str) -> logging.Formatter:
    return {"text": TextFormatter, "journal": JournalFormatter, "json": JsonFormatter}[form]()


def printable(text: str) -> str:
    """The text without control characters other than line ends and tabs: what comes from outside (a model's name, a
    header) can then neither move the cursor of a terminal nor colour it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class TextFormatter(logging.Formatter):
    """`2026-01-31 10:20:30 WARNING pages: text`; further lines of one record are indented."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        first, *rest = _lines(self, record)
        return "\n".join([f"{when} {record.levelname:<7} {_source(record)}: {first}", *(f"  {line}" for line in rest)])


class JournalFormatter(logging.Formatter):
    """Each line with its syslog priority, `<4>pages: text`; journald adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next((p for level, p in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{_source(record)}: {line}" for line in _lines(self, record))


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, RFC 3339), level, source, message; the fields given as `extra={"fields": {...}}`;
    a traceback under `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry: dict[str, object] = {
            "time": when,
            "level": record.levelname.lower(),
            "source": _source(record),
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            entry |= {key: value for key, value in fields.items() if key not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _source(record: logging.LogRecord) -> str:
    """The part of the house that speaks: expertd.pages.pager is pages."""
    parts = record.name.split(".")
    return parts[1] if parts[0] == "expertd" and len(parts) > 1 else parts[0]


def _lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    return printable(text).splitlines() or [""]


def _excepthook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("expertd").critical("unexpected %s: %s", kind.__name__, error, exc_info=error)


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = args.thread.name if args.thread else "?"
    logging.getLogger("expertd").error("thread %s ended by an error", name, exc_info=args.exc_value)
