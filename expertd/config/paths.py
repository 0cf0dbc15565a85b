"""Where the configuration lies, and which directories, sockets and key files `auto` stands for.

Follows the XDG base directories for a person and systemd's STATE_DIRECTORY, RUNTIME_DIRECTORY and
CREDENTIALS_DIRECTORY for a service. Creates nothing.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expertd.config.schema import ServerSettings, StateSettings
from expertd.errors import ConfigError

SYSTEM_FILE = Path("/etc/expertd/expertd.toml")
SYSTEM_SOCKET = Path("/run/expertd/admin.sock")
_LEAST_KEY = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Resolved paths; None is none."""

    state_directory: Path
    socket: Path | None
    api_keys_file: Path | None
    admin_key_file: Path | None


def config_file(given: Path | None, env: Mapping[str, str]) -> Path | None:
    """The file to read, or None where there is none. ConfigError when one was named that is not there."""
    if given is not None:
        return _must_exist(given, "--config")
    if named := env.get("EXPERTD_CONFIG"):
        return _must_exist(Path(named).expanduser(), "EXPERTD_CONFIG")
    return next((path for path in default_files(env) if path.exists()), None)


def default_files(env: Mapping[str, str]) -> list[Path]:
    """The files looked for where none is named: the user's, then the system's."""
    home = _under(env, "XDG_CONFIG_HOME", ".config")
    return [*([home / "expertd" / "expertd.toml"] if home else []), SYSTEM_FILE]


def _must_exist(path: Path, named_by: str) -> Path:
    if not path.exists():
        raise ConfigError(f"{path}: no such file (named by {named_by})")
    return path


def _under(env: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    """An XDG directory; the specification says that a relative one is to be ignored."""
    if (directory := env.get(variable, "")).startswith("/"):
        return Path(directory)
    return Path(env["HOME"]) / below_home if env.get("HOME", "").startswith("/") else None


def places(server: ServerSettings, state: StateSettings, env: Mapping[str, str]) -> Places:
    """What `auto` stands for under this environment."""
    directory = Path(state.directory).expanduser() if state.directory != "auto" else _state_directory(env)
    return Places(
        state_directory=directory,
        socket=_socket(server.socket, directory, env),
        api_keys_file=_credential(server.api_keys_file, "api-keys", env),
        admin_key_file=_credential(server.admin_key_file, "admin-key", env),
    )


def _state_directory(env: Mapping[str, str]) -> Path:
    # systemd joins several StateDirectory= names with colons; ours has one, a drop-in may add more behind it.
    if ours := env.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(ours)
    user = _under(env, "XDG_STATE_HOME", ".local/state")
    return user / "expertd" if user else Path("/var/lib/expertd")


def _socket(setting: str, state: Path, env: Mapping[str, str]) -> Path | None:
    if setting != "auto":
        return Path(setting).expanduser() if setting else None
    if ours := env.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return Path(ours) / "admin.sock"
    if (session := env.get("XDG_RUNTIME_DIR", "")).startswith("/"):
        return Path(session) / "expertd" / "admin.sock"
    return state / "admin.sock"


def sockets_to_try(config_socket: Path | None) -> list[Path]:
    """Where a verb looks for a running daemon: the socket that this configuration gives, then the system's."""
    candidates = [config_socket] if config_socket else []
    return candidates + [p for p in (SYSTEM_SOCKET,) if p not in candidates]


def _credential(setting: str, name: str, env: Mapping[str, str]) -> Path | None:
    if setting != "auto":
        return Path(setting).expanduser() if setting else None
    directory = env.get("CREDENTIALS_DIRECTORY")
    path = Path(directory) / name if directory else None
    return path if path and path.exists() else None


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a key file: one a line, blank lines and lines from `#` skipped.

    Raises ConfigError, which names a line and never repeats it: a file that others may read, no key, a short one.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    # systemd's credentials are 0400 or 0440 on a file system of their own; elsewhere others must be kept out.
    if stat.S_IMODE(mode) & stat.S_IROTH:
        raise ConfigError(f"{path}: everyone may read these keys", hint=f"chmod o-rwx {path}")
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            hint = "for one: openssl rand -hex 32"
            raise ConfigError(f"{path}:{number}: a key is {_LEAST_KEY} or more printable ASCII characters", hint=hint)
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no key", hint="one key a line")
    return tuple(keys)
