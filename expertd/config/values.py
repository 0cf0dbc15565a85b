"""How text becomes a setting's value, what its limits read like, and how a value is written again.

A setting is one field of a section of `schema`, described by `Setting`. Errors here are ValueErrors with half a
sentence; `load` adds where the value came from.
"""

from __future__ import annotations

import math
import re
import tomllib
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from expertd.config.schema import SECTIONS
from expertd.errors import UsageError
from expertd.units import parse_seconds, parse_size

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_FORMS = {
    "size": "bytes or a size: 512MiB, 20GiB",
    "size_or_auto": "auto, bytes or a size: 512MiB, 20GiB",
    "budget": "auto, bytes, a size: 20GiB, or a share: 25%",
    "seconds": "seconds or a time: 90, 5m, 1h",
    "overrides": 'a list of "pattern=buffer"',
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: `key` is section.name, `type_` its bare type, `meta` its description and limits."""

    section: str
    name: str
    type_: Any
    meta: msgspec.Meta
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def kind(self) -> str:
        return str((self.meta.extra or {}).get("kind", ""))

    @property
    def meaning(self) -> str:
        return self.meta.description or ""

    @property
    def reload(self) -> bool:
        """Whether a reload applies it; otherwise it waits for a restart."""
        return bool((self.meta.extra or {}).get("reload"))

    @property
    def flag(self) -> str:
        """The option of `expertd serve` that sets it."""
        return str((self.meta.extra or {}).get("flag") or f"--set {self.key}")

    @property
    def variable(self) -> str:
        return f"EXPERTD_{self.section}_{self.name}".upper()

    @property
    def annotated(self) -> Any:
        return typing.Annotated[self.type_, self.meta]


@cache
def settings() -> dict[str, Setting]:
    """All settings by key, in the order of the sections."""
    found: dict[str, Setting] = {}
    for section, struct in SECTIONS.items():
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            base, meta = typing.get_args(hints[field.name])
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            setting = Setting(section, field.name, base, meta, default)
            found[setting.key] = setting
    return found


def limits(setting: Setting) -> str:
    """What may be written, as half a sentence."""
    meta, words = setting.meta, ""
    if typing.get_origin(setting.type_) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(setting.type_))
    if setting.type_ is bool:
        return "true or false"
    if setting.kind in _FORMS:
        words = _FORMS[setting.kind]
    elif setting.type_ in (int, float):
        words = "a whole number" if setting.type_ is int else "a number"
    elif typing.get_origin(setting.type_) is list:
        words = "a list of [token, bias]" if setting.type_ == list[tuple[int, float]] else "a list of texts"
    else:
        words = "a path" if setting.kind == "path" else "text"
    if meta.pattern:
        words = "1 to 64 letters, digits, '.', '_' or '-'"
    low, high = _written(setting, meta.ge), _written(setting, meta.le)
    if low and high:
        return f"{words}, {low} to {high}"
    return f"{words}, {low} or more" if low else f"{words}, at most {high}" if high else words


def _written(setting: Setting, bound: float | None) -> str:
    if bound is None:
        return ""
    return size_text(int(bound)) if setting.kind == "size" else f"{bound:.10g}"


def size_text(nbytes: int) -> str:
    """An exact size in the largest binary unit that divides it: 16MiB, 1500."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def from_text(setting: Setting, text: str) -> Any:
    """The raw value that an environment variable or a flag stands for. ValueError when the text has no such form."""
    if setting.type_ is bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return word in _TRUE
    if typing.get_origin(setting.type_) is list:
        return _list_from_text(text)
    if setting.type_ in (int, float) and not setting.kind:
        return setting.type_(text)
    return text


def _list_from_text(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        found = tomllib.loads(f"value = {text}")["value"]
        return list(found)
    return [part.strip() for part in text.split(",") if part.strip()]


def check(setting: Setting, raw: Any) -> Any:
    """The value of a raw one: sizes and times as numbers, type and limits checked. Raises ValueError."""
    value = _NORMALISE.get(setting.kind, lambda v: v)(raw)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    try:
        return msgspec.convert(value, setting.annotated)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _size(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise ValueError("not a size")
    try:
        nbytes = parse_size(raw)
    except UsageError as error:
        raise ValueError(error.message) from None
    if nbytes < 0:
        raise ValueError("a size cannot be negative")
    return nbytes


def _size_or_auto(raw: Any) -> int | str:
    return "auto" if raw == "auto" else _size(raw)


def _budget(raw: Any) -> int | str:
    found = _PERCENT.fullmatch(raw) if isinstance(raw, str) else None
    if found:
        if not 0 < float(found[1]) <= 100:
            raise ValueError(f"{raw!r} is not above 0% and at most 100%")
        return f"{float(found[1]):g}%"
    return _size_or_auto(raw)


def _seconds(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a time")
    try:
        return parse_seconds(raw)
    except UsageError as error:
        raise ValueError(error.message) from None


def _overrides(raw: Any) -> Any:
    for rule in raw if isinstance(raw, list) else ():
        pattern, equals, buffer = str(rule).rpartition("=")
        if not (pattern and equals and buffer):
            raise ValueError(f"{rule!r} is not pattern=buffer")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a pattern: {error}") from None
    return raw


_NORMALISE: dict[str, Any] = {
    "size": _size,
    "size_or_auto": _size_or_auto,
    "budget": _budget,
    "seconds": _seconds,
    "overrides": _overrides,
}


def resolve_budget(value: int | str, total_nbytes: int) -> int | None:
    """Bytes of a budget setting: a share is taken of `total_nbytes`; None is auto."""
    if isinstance(value, int):
        return value
    if value.endswith("%"):
        return int(total_nbytes * float(value[:-1]) / 100)
    return None


def toml_text(value: Any, setting: Setting | None = None) -> str:
    """The value as TOML writes it; sizes in units."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and setting and setting.kind in ("size", "size_or_auto", "budget"):
        text = size_text(value)
        return text if text.isdigit() else f'"{text}"'
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    return msgspec.json.encode(str(value)).decode()
