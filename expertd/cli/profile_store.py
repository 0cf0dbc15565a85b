"""Where a verb finds profiles: in a running daemon, which holds the newest, or in the files of a state directory.

1. `--state` names a directory: its files.
2. Else the daemon that answers, unless it serves another model than the one that `--model` names.
3. Else the files of the configured state directory. What a daemon keeps is locked: it is read there, not changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

import click

from expertd.cli.client import DaemonClient, RefusedError, daemon_options
from expertd.errors import NotReadyError, ProfileNotFoundError, StateError, UsageError

if TYPE_CHECKING:
    from expertd.runtime.profile import Profile, Shape
    from expertd.runtime.profile_file import ProfileDirectory

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Where:
    """The options that say where profiles are."""

    socket: Path | None
    url: str | None
    state: Path | None
    model: Path | None


def place_options(function: _F) -> _F:
    """--state and --model beside the daemon's options; passed on as `state` and `model`."""
    function = click.option(
        "--model", type=click.Path(path_type=Path), help="Whose profiles, where several models have some."
    )(function)
    function = click.option(
        "--state", type=click.Path(path_type=Path), help="Use this state directory's files, not a daemon."
    )(function)
    return daemon_options(function)


class Store(Protocol):
    """Profiles of one model, or of all for `rows`."""

    where: str

    def rows(self) -> list[dict[str, Any]]: ...
    def get(self, name: str) -> Profile: ...
    def has(self, name: str) -> bool: ...
    def put(self, profile: Profile) -> str:
        """Returns a word of warning, or nothing."""

    def rename(self, name: str, to: str) -> None: ...
    def delete(self, name: str) -> None: ...
    def shape(self) -> Shape:
        """The model's; UsageError where none is named."""


def open_store(where: Where) -> Store:
    """See the module. Raises NotReadyError where a daemon was named and does not answer."""
    shape = _shape_of(where.model) if where.model is not None else None
    if where.state is None:
        try:
            remote = DaemonStore(DaemonClient(where.socket, where.url))
        except (NotReadyError, RefusedError):
            if where.socket is not None or where.url is not None:
                raise
        else:
            if shape is None or shape.fingerprint == remote.shape().fingerprint:
                return remote
            if where.socket is not None or where.url is not None:
                raise UsageError("the daemon serves another model than --model names", hint="leave one of them out")
    return FileStore(where.state or _state_directory(), shape)


def _state_directory() -> Path:
    from expertd.config import load_config

    return load_config(None, os.environ, {}).places.state_directory


def _shape_of(model: Path) -> Shape:
    from expertd.model.expertmap import build_map
    from expertd.model.fingerprint import fingerprint
    from expertd.model.gguf import read_model
    from expertd.runtime.profile import Shape

    gguf = read_model(model)
    layout = build_map(gguf).layout()
    return Shape(fingerprint(gguf), model.stem, layout.n_layers, layout.n_experts, max(1, layout.n_experts_used))


class DaemonStore:
    """Those of a running daemon's model."""

    def __init__(self, client: DaemonClient) -> None:
        self._client = client
        self._listed = client.get("/expertd/profiles")
        self.where = "the running daemon"

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._listed["profiles"]
        return found

    def get(self, name: str) -> Profile:
        from expertd.runtime.profile import check_name
        from expertd.runtime.profile_file import from_document

        return from_document(self._client.get(f"/expertd/profiles/{quote(check_name(name))}"), name)

    def has(self, name: str) -> bool:
        return any(row["name"] == name for row in self._listed["profiles"])

    def put(self, profile: Profile) -> str:
        from expertd.runtime.profile_file import document

        answer = self._client.put(f"/expertd/profiles/{quote(profile.name)}", document(profile))
        return "" if answer["saved"] else "the daemon keeps it in memory only: its state directory cannot be written"

    def rename(self, name: str, to: str) -> None:
        self._client.post(f"/expertd/profiles/{quote(name)}/rename", {"to": to})

    def delete(self, name: str) -> None:
        self._client.delete(f"/expertd/profiles/{quote(name)}")

    def shape(self) -> Shape:
        from expertd.runtime.profile import Shape

        m = self._listed["model"]
        return Shape(m["fingerprint"], m["name"], m["layers"], m["experts"], m["experts_used"])


class FileStore:
    """Files of a state directory; of one model where its shape is given."""

    def __init__(self, state: Path, shape: Shape | None) -> None:
        from expertd.runtime.profile_file import ProfileDirectory, models

        self.where = str(state)
        self._shape = shape
        self._state = state
        fingerprints = [shape.fingerprint] if shape is not None else models(state)
        self._directories = [ProfileDirectory(state, f) for f in fingerprints]

    def rows(self) -> list[dict[str, Any]]:
        from expertd.runtime.profiles import summary

        rows = []
        for directory in self._directories:
            for name in directory.names():
                try:
                    profile = directory.read(name)
                    rows.append({**summary(profile), "saved": True} if profile else {"name": name})
                except StateError as error:
                    rows.append({"name": name, "fingerprint": directory.path.name, "error": error.message})
        return rows

    def _of(self, name: str) -> ProfileDirectory:
        from expertd.runtime.profile import check_name

        check_name(name)
        found = [d for d in self._directories if d.file(name).exists()]
        if not found:
            raise ProfileNotFoundError(f"there is no profile {name!r} in {self.where}", hint="see `profile list`")
        if len(found) > 1:
            raise UsageError(f"{len(found)} models have a profile {name!r}", hint="name one by --model FILE")
        return found[0]

    def get(self, name: str) -> Profile:
        directory = self._of(name)
        try:
            profile = directory.read(name)
        except StateError as error:
            raise StateError(f"{directory.file(name)}: {error.message}", hint=error.hint) from error
        if profile is None:
            raise ProfileNotFoundError(f"there is no profile {name!r} in {self.where}")
        return profile

    def has(self, name: str) -> bool:
        return any(d.file(name).exists() for d in self._directories)

    def put(self, profile: Profile) -> str:
        from expertd.runtime.profile_file import ProfileDirectory, check_model

        if self._shape is not None:
            check_model(profile, self._shape)
        directory = ProfileDirectory(self._state, profile.shape.fingerprint)
        _locked(directory, lambda: directory.write(profile))
        return ""

    def rename(self, name: str, to: str) -> None:
        profile, directory = self.get(name), self._of(name)
        if directory.file(to).exists():
            raise StateError(f"there is a profile {to!r} already", hint="delete it first")

        def move() -> None:
            directory.write(profile.copy(to))
            directory.delete(name)

        _locked(directory, move)

    def delete(self, name: str) -> None:
        directory = self._of(name)
        _locked(directory, lambda: directory.delete(name))

    def shape(self) -> Shape:
        if self._shape is None:
            raise UsageError("no model is named and no daemon answers", hint="give --model FILE")
        return self._shape


def _locked(directory: ProfileDirectory, work: Callable[[], None]) -> None:
    directory.open()
    try:
        work()
    finally:
        directory.close()
