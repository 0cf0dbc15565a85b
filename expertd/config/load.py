"""Defaults < file < environment < flags, each value with its origin; and what differs between two configurations.

The way of `load_config`:
1. find the file: the one given, else EXPERTD_CONFIG, else the user's, else the system's; a named one must exist;
2. lay the file's keys over the defaults, then EXPERTD_<SECTION>_<KEY>, then the flags that were given;
3. check each value where it came from, so that the error can say where;
4. check what only shows between values (both TLS files or none);
5. find the directories and files that `auto` stands for.
An unknown key is an error with the nearest known one. Values of unknown keys are never repeated: they may be secrets.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertd.config.paths import Places, config_file, places
from expertd.config.schema import (
    SECTIONS,
    CacheSettings,
    EngineSettings,
    LogSettings,
    ModelSettings,
    ProfileSettings,
    SamplingSettings,
    ServerSettings,
    StateSettings,
    TraceSettings,
    WarmSettings,
)
from expertd.config.values import Setting, check, from_text, limits, settings, toml_text
from expertd.errors import ConfigError

_PREFIX = "EXPERTD_"
# Kubernetes and Docker links set these for a service named expertd; they are no settings.
_FOREIGN = ("EXPERTD_SERVICE_", "EXPERTD_PORT")
# Of the verbs that speak to a daemon, and the name of the file itself.
_NOT_SETTINGS = ("EXPERTD_CONFIG", "EXPERTD_API_KEY", "EXPERTD_ADMIN_KEY", "EXPERTD_URL")
_SECRET = re.compile("key|token|secret|password", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, where each came from, and the places that `auto` stands for."""

    model: ModelSettings
    engine: EngineSettings
    sampling: SamplingSettings
    cache: CacheSettings
    profile: ProfileSettings
    warm: WarmSettings
    server: ServerSettings
    log: LogSettings
    trace: TraceSettings
    state: StateSettings
    places: Places
    file: Path | None
    origins: Mapping[str, str] = field(repr=False)

    def value(self, key: str) -> Any:
        """The value of `section.name`. KeyError when there is no such key."""
        setting = settings()[key]
        return getattr(getattr(self, setting.section), setting.name)

    def origin(self, key: str) -> str:
        """Where a value came from: "default", "FILE:LINE", "environment EXPERTD_..." or "flag --..."."""
        settings()[key]
        return self.origins.get(key, "default")

    def rows(self) -> Iterator[tuple[Setting, Any, str]]:
        """(setting, value, origin) of every key, in the order of the sections."""
        for key, setting in settings().items():
            yield setting, self.value(key), self.origin(key)

    def changes(self, new: Config) -> tuple[list[str], list[str]]:
        """Keys that differ in `new`: those that a reload applies, and those that need a restart."""
        differ = [key for key in settings() if self.value(key) != new.value(key)]
        return [k for k in differ if settings()[k].reload], [k for k in differ if not settings()[k].reload]


@dataclass(frozen=True, slots=True)
class _Given:
    """A raw value and the words for where it stands."""

    raw: Any
    origin: str


def load_config(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """The configuration. `flags` maps `section.name` to a value or to text; None means that the flag was not given.

    Raises ConfigError, with where the fault is and what to write instead.
    """
    path = config_file(file, env)
    given: dict[str, _Given] = {}
    if path is not None:
        given.update(_from_file(path))
    given.update(_from_environment(env))
    given.update(_from_flags(flags))
    values = {key: _checked(settings()[key], item) for key, item in given.items()}
    sections: dict[str, Any] = {
        name: struct(**{s.name: values[s.key] for s in settings().values() if s.section == name and s.key in values})
        for name, struct in SECTIONS.items()
    }
    origins = {key: item.origin for key, item in given.items()}
    _check_together(sections["server"], origins)
    found = places(sections["server"], sections["state"], env)
    return Config(**sections, places=found, file=path, origins=origins)


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    given = {}
    for section, table in document.items():
        if section not in SECTIONS:
            known = _nearest(section) if not isinstance(table, dict) else _nearest_section(section)
            line = _line(text, section, "") or _line(text, "", section)
            raise ConfigError(f"{_at(path, line)}: {section}: unknown {_noun(table)}", hint=known)
        if not isinstance(table, dict):
            line = _line(text, "", section)
            raise ConfigError(
                f"{_at(path, line)}: {section} is a section", hint=f"write [{section}] and its keys below"
            )
        for name, raw in table.items():
            key, origin = f"{section}.{name}", _at(path, _line(text, section, name))
            if key not in settings():
                raise ConfigError(f"{origin}: {key}: unknown key", hint=_nearest(key))
            given[key] = _Given(raw, origin)
    return given


def _noun(table: object) -> str:
    return "section" if isinstance(table, dict) else "key"


def _at(path: Path, line: int | None) -> str:
    return f"{path}:{line}" if line else str(path)


def _line(text: str, section: str, name: str) -> int | None:
    """The line of a key, or of a section's head where `name` is empty. None where the document is written in a form
    that only a TOML parser follows (quoted keys, inline tables)."""
    head = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := head.match(line):
            current = found[1]
            if current == section and not name:
                return number
        elif name:
            dotted = f"{section}.{name}" if current == "" and section else ""
            for written in filter(None, (name if current == section else "", dotted)):
                if re.match(rf"\s*{re.escape(written)}\s*=", line):
                    return number
    return None


def _from_environment(env: Mapping[str, str]) -> dict[str, _Given]:
    by_variable = {s.variable: s for s in settings().values()}
    given = {}
    for variable, text in sorted(env.items()):
        if not variable.startswith(_PREFIX) or variable in _NOT_SETTINGS or variable.startswith(_FOREIGN):
            continue
        setting = by_variable.get(variable)
        if setting is None:
            _refuse_variable(variable, list(by_variable))
            continue
        if not text.strip() and setting.type_ is not str:
            continue
        origin = f"environment {variable}"
        given[setting.key] = _Given(_text_value(setting, text, origin), origin)
    return given


def _refuse_variable(variable: str, known: list[str]) -> None:
    """Raises for a variable that looks like a setting; others may belong to other programs."""
    near = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
    in_section = variable.removeprefix(_PREFIX).split("_")[0].lower() in SECTIONS
    if near or in_section:
        hint = f"did you mean {near[0]}?" if near else "`expertd config show` lists the keys"
        raise ConfigError(f"environment: {variable}: unknown key", hint=hint)


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    given = {}
    for key, raw in flags.items():
        if raw is None:
            continue
        setting = settings().get(key)
        if setting is None:
            raise ConfigError(f"{key}: unknown key", hint=_nearest(key))
        origin = f"flag {setting.flag}"
        value = _text_value(setting, raw, origin) if isinstance(raw, str) else raw
        given[key] = _Given(list(value) if isinstance(value, tuple) else value, origin)
    return given


def _text_value(setting: Setting, text: str, origin: str) -> Any:
    try:
        return from_text(setting, text)
    except ValueError:
        raise _refused(setting, text, origin, "") from None


def _checked(setting: Setting, item: _Given) -> Any:
    try:
        return check(setting, item.raw)
    except ValueError as error:
        raise _refused(setting, item.raw, item.origin, str(error)) from None


def _refused(setting: Setting, raw: object, origin: str, why: str) -> ConfigError:
    text = toml_text(raw) if isinstance(raw, (bool, int, float, str)) else repr(raw)
    shown = "this value" if _SECRET.search(setting.name) or len(text) > 80 else text
    # msgspec's own words ("Expected `int`, got `str`") name Python's types; the limits say it in the user's.
    reason = (
        f" ({why})"
        if why and not why.startswith(("Expected", "Invalid enum")) and not why.endswith("is not a size")
        else ""
    )
    return ConfigError(f"{origin}: {setting.key}: {shown} is not allowed{reason}", hint=f"write {limits(setting)}")


def _check_together(server: ServerSettings, origins: Mapping[str, str]) -> None:
    if bool(server.tls_certificate) != bool(server.tls_key):
        have, lacks = ("tls_certificate", "tls_key") if server.tls_certificate else ("tls_key", "tls_certificate")
        where = origins[f"server.{have}"]
        raise ConfigError(f"{where}: server.{have} is set without server.{lacks}", hint="set both or none")


def _nearest_section(section: str) -> str:
    near = difflib.get_close_matches(section, SECTIONS, n=1)
    return f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(SECTIONS)}"


def _nearest(key: str) -> str:
    """A hint with the known key that is likeliest meant: the same name in another section, else the closest."""
    name = key.rpartition(".")[2]
    same = [k for k in settings() if k.endswith(f".{name}")]
    near = same or difflib.get_close_matches(key, settings(), n=1, cutoff=0.6)
    if not near:
        by_name = {s.name: s.key for s in settings().values()}
        near = [by_name[n] for n in difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)]
    return f"did you mean {near[0]}?" if near else "`expertd config show` lists the keys"
