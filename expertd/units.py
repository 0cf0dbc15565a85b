"""Sizes and times between people and numbers: parsing "20GiB" and printing it again.

Not here: percentages of a model's experts ("25%"), which only `cli.replay` can resolve.
"""

from __future__ import annotations

import re

from expertd.errors import UsageError

_SUFFIX = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes from "20GiB", "1.5G" (binary), "900MB" (decimal) or a plain number of bytes.

    Raises UsageError when the text is no size.
    """
    if isinstance(text, int):
        return text
    found = _SIZE.fullmatch(text)
    scale = _SUFFIX.get(found[2].lower()) if found else None
    if found is None or scale is None:
        raise UsageError(f"{text!r} is not a size", hint="write bytes or a unit: 20GiB, 900MB, 1.5G")
    return int(float(found[1]) * scale)


def format_size(nbytes: float) -> str:
    """Four significant characters and a binary unit: 15.7 GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


_SECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?\s*", re.IGNORECASE)
_SECOND_SCALE = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str | float) -> float:
    """Seconds from "3s", "250ms", "5m", "1h" or a plain number. Raises UsageError."""
    if isinstance(text, (int, float)):
        return float(text)
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a time", hint="write seconds or a unit: 3s, 250ms, 5m")
    return float(found[1]) * _SECOND_SCALE[(found[2] or "s").lower()]


def format_seconds(seconds: float) -> str:
    """A time a person reads at a glance: 850 ms, 3.2 s, 2 min 05 s."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
