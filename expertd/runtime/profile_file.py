"""Profiles on disk: one file each, whole or not there; what cannot be read is set aside, never deleted.

A file is two lines of JSON. The first describes (format, version, model, dates) and gives the length and CRC-32 of the
second, which holds the counts, a row a layer. So a torn file is found out, a list costs one line a file, and a person
can read both. A file lies at STATE/profiles/FINGERPRINT/NAME.profile: models never meet, nor do their `default`s.

Written under another name, synced, renamed, and the directory synced: after a crash the old file or the new one is
there.

Versions: `version` is the writer's, `min_reader` the oldest format version that can read it. Fields are only added, and
readers ignore those they do not know (an older daemon that saves the profile again drops them), so that neither an
upgrade nor a downgrade needs a step as long as `min_reader` stands; a change that older readers would misread raises
it, and these set the file aside unread, as NAME.profile.newer-1: nothing that a newer daemon wrote is overwritten.

Not here: what is in memory and when it is saved (`profiles`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from expertd import __version__
from expertd.errors import StateError
from expertd.runtime.profile import Profile, Shape, check_name, is_name

log = logging.getLogger("expertd.profiles")

FORMAT = "expertd-profile"
VERSION = 1
MIN_READER = 1
SUFFIX = ".profile"
MAX_NBYTES = 32 << 20
_MAX_EXPERTS = 1 << 20
_MAX_SET_ASIDE = 1000

_Count = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_MAX_EXPERTS)]


class NewerFormatError(StateError):
    """A newer expertd wrote it in a way that this one cannot read."""


class Description(msgspec.Struct, kw_only=True):
    """The first line."""

    format: str
    version: int
    min_reader: int
    name: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8,64}$")]
    model: str = ""
    layers: _Size
    experts: _Size
    experts_used: _Size
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    half_life: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    created: float
    updated: float
    expertd: str = ""
    sources: list[str] = msgspec.field(default_factory=list)
    body_bytes: int = 0
    body_crc32: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.fingerprint, self.model, self.layers, self.experts, self.experts_used)


class _Rows(msgspec.Struct):
    counts: list[list[_Count]]


class Document(Description, kw_only=True):
    """Both lines in one: what the daemon gives and takes over HTTP."""

    counts: list[list[_Count]]


def document(profile: Profile) -> dict[str, Any]:
    """The profile as JSON-ready data, a row of counts a layer."""
    return {**msgspec.to_builtins(_describe(profile, b"")), "counts": _rows(profile)}


def _describe(profile: Profile, body: bytes) -> Description:
    shape = profile.shape
    return Description(
        format=FORMAT, version=VERSION, min_reader=MIN_READER, name=profile.name, fingerprint=shape.fingerprint,
        model=shape.model, layers=shape.n_layers, experts=shape.n_experts, experts_used=shape.n_used,
        tokens=profile.tokens, half_life=profile.half_life, created=round(profile.created, 3),
        updated=round(profile.updated, 3), expertd=profile.version, sources=list(profile.sources),
        body_bytes=len(body), body_crc32=zlib.crc32(body),
    )  # fmt: skip


def _rows(profile: Profile) -> list[list[float]]:
    n, counts = profile.shape.n_experts, profile.counts
    return [[round(c, 4) for c in counts[first : first + n]] for first in range(0, len(counts), n)]


def encode(profile: Profile) -> bytes:
    """The file's bytes."""
    body = msgspec.json.encode({"counts": _rows(profile)}) + b"\n"
    return msgspec.json.encode(_describe(profile, body)) + b"\n" + body


def decode(data: bytes, name: str = "") -> Profile:
    """The profile in a file's bytes, under `name` where that is given. StateError says what is wrong with it."""
    head = describe(data)
    body = data[data.index(b"\n") + 1 :]
    if len(body) != head.body_bytes:
        raise StateError(f"torn: {len(body)} of {head.body_bytes} bytes of counts are there")
    if zlib.crc32(body) != head.body_crc32:
        raise StateError("damaged: the counts do not match their checksum")
    return _profile(head, _convert(body, _Rows).counts, name)


def from_document(given: object, name: str = "") -> Profile:
    """The profile in a document that came over HTTP. StateError."""
    try:
        document = msgspec.convert(given, Document)
    except msgspec.ValidationError as error:
        raise StateError(f"no profile: {error}") from error
    _check_format(document)
    return _profile(document, document.counts, name)


def describe(data: bytes) -> Description:
    """The first line alone. StateError."""
    line, newline, _ = data.partition(b"\n")
    if not data:
        raise StateError("torn: the file is empty")
    if FORMAT.encode() not in line[:200]:
        raise StateError("foreign: no profile of expertd")
    if not newline:
        raise StateError("torn: it ends in its first line")
    head: Description = _convert(line, Description)
    _check_format(head)
    return head


def _check_format(head: Description) -> None:
    if head.format != FORMAT:
        raise StateError("foreign: no profile of expertd")
    if head.min_reader > VERSION:
        raise NewerFormatError(
            f"foreign: written by expertd {head.expertd[:40]} in format {head.version}; this one reads up to {VERSION}",
            hint="upgrade expertd",
        )


def _convert(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"damaged: {error}") from error


def _profile(head: Description, rows: list[list[float]], name: str) -> Profile:
    if len(rows) != head.layers or any(len(row) != head.experts for row in rows):
        raise StateError(f"damaged: the counts are not {head.layers} rows of {head.experts}")
    if head.layers * head.experts > _MAX_EXPERTS:
        raise StateError(f"foreign: {head.layers} layers of {head.experts} experts are more than any model has")
    return Profile(
        check_name(name or head.name), head.shape, [c for row in rows for c in row], tokens=head.tokens,
        half_life=head.half_life, created=head.created, updated=head.updated, version=head.expertd or __version__,
        sources=tuple(head.sources),
    )  # fmt: skip


def check_model(profile: Profile, shape: Shape) -> None:
    """Raises StateError when a profile is another model's."""
    theirs, sizes = profile.shape, ("n_layers", "n_experts")
    if theirs.fingerprint != shape.fingerprint or any(getattr(theirs, n) != getattr(shape, n) for n in sizes):
        raise StateError(
            f"it is of another model: {theirs.model or 'unnamed'}, fingerprint {theirs.fingerprint}",
            hint=f"this one is {shape.model or 'unnamed'}, fingerprint {shape.fingerprint}",
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Whole or not at all, also through a crash. StateError with the system's reason; then nothing is left behind."""
    passing = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(passing, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            passing.unlink()
        raise StateError(f"{path}: cannot be written: {error.strerror}", hint="the old file is untouched") from error


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems refuse this; the rename itself is done.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(path: Path, why: str = "bad") -> Path | None:
    """Renames a file that cannot be used to NAME.bad-1, -2 ...; None where the directory does not let it."""
    for n in range(1, _MAX_SET_ASIDE):
        other = path.with_name(f"{path.name}.{why}-{n}")
        if not os.path.lexists(other):
            try:
                path.rename(other)
            except OSError:
                return None
            return other
    return None


class ProfileDirectory:
    """The profiles of one model. No method keeps state but `lock`; any one thread at a time."""

    def __init__(self, state: Path, fingerprint: str) -> None:
        self.path = state / "profiles" / fingerprint
        self._lock: int | None = None

    def file(self, name: str) -> Path:
        return self.path / f"{check_name(name)}{SUFFIX}"

    def open(self) -> None:
        """Makes the directory, takes its lock, clears what a killed writer left; nothing where it has the lock already.
        StateError: it cannot be written, or another process has it."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise StateError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StateError(f"{self.path}: another process keeps these profiles") from error
        for left in self.path.glob(".*.tmp-*"):
            with contextlib.suppress(OSError):
                left.unlink()

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def names(self) -> list[str]:
        """Names that have a file, sorted."""
        try:
            found = [p.name.removesuffix(SUFFIX) for p in self.path.iterdir() if p.name.endswith(SUFFIX)]
        except OSError:
            return []
        return sorted(n for n in found if is_name(n))

    def read(self, name: str) -> Profile | None:
        """None where there is no such file. StateError for one that cannot be used; it is left where it is."""
        return decode(data, name) if (data := _read(self.file(name))) is not None else None

    def load(self, name: str, shape: Shape) -> Profile | None:
        """As `read`, but what cannot be used, or is another model's, is set aside, said, and counts as not there."""
        try:
            profile = self.read(name)
            if profile is not None:
                check_model(profile, shape)
            return profile
        except StateError as error:
            self._put_aside(self.file(name), error)
            return None

    def _put_aside(self, path: Path, error: StateError) -> bool:
        aside = set_aside(path, "newer" if isinstance(error, NewerFormatError) else "bad")
        where = f"set aside as {aside.name}" if aside else "left where it is, since the directory is not writable"
        log.warning("profile %s: %s; %s", path, error.line(), where)
        return aside is not None

    def describe(self) -> Iterator[tuple[str, Description | StateError]]:
        """The first line of each file, or what is wrong with it."""
        for name in self.names():
            try:
                data = _read(self.file(name))
                if data is not None:
                    yield name, describe(data)
            except StateError as error:
                yield name, error

    def write(self, profile: Profile) -> None:
        """StateError. In the place of whatever has the name, but for what a newer expertd wrote: that is set aside."""
        path = self.file(profile.name)
        try:
            if (old := _read(path)) is not None:
                describe(old)
        except NewerFormatError as error:
            if not self._put_aside(path, error):
                raise
        except StateError:
            pass
        write_atomically(path, encode(profile))

    def delete(self, name: str) -> None:
        """StateError. Nothing happens where there is no such file."""
        try:
            self.file(name).unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"{self.file(name)}: cannot be deleted: {error.strerror}") from error


def models(state: Path) -> list[str]:
    """Fingerprints of the models that have profiles under a state directory."""
    try:
        return sorted(p.name for p in (state / "profiles").iterdir() if p.is_dir())
    except OSError:
        return []


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as f:
            data = f.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_NBYTES:
        raise StateError(f"foreign: more than {MAX_NBYTES} bytes")
    return data
