"""The profiles of the loaded model: which one a request teaches, and when they are saved.

The engine thread teaches: `begin`, `observe` for each route, `end`. Everybody else copies, replaces and saves. One lock
guards what is in memory and is never held across the disk; another orders what goes to the disk. A thread of its own
saves what changed every few minutes, since a sync may take seconds. A state directory that cannot be written is said
once and costs nothing but what was learnt, at the end of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from expertd import __version__
from expertd.errors import ProfileNotFoundError, StateError
from expertd.runtime import profile as hot
from expertd.runtime.profile import Profile, Shape, check_name
from expertd.runtime.profile_file import ProfileDirectory, check_model
from expertd.types import Phase

log = logging.getLogger("expertd.profiles")

MAX_PROFILES = 256
"""Names come from requests: a client that makes them up must not fill memory and disk."""
NOBODY = ""
"""The name that teaches no profile."""


class Profiles:
    """All profiles of one model. `directory` None keeps them in memory alone; `seconds` lie between saves, 0 saves at
    the stop alone."""

    def __init__(
        self, shape: Shape, directory: ProfileDirectory | None, default: str = hot.DEFAULT_NAME, seconds: float = 300.0
    ) -> None:
        self.shape, self.default = shape, check_name(default)
        self._directory, self._seconds = directory, seconds
        self._known: dict[str, Profile] = {}
        self._dirty: set[str] = set()
        self._lock = threading.RLock()
        self._disk = threading.RLock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expertd-profiles", daemon=True)
        self._taught: Profile | None = None
        self.saves = 0
        self.save_failures = 0
        self.saved_at: float | None = None
        """When one was last written (time.time()); None before the first."""
        self.trouble = ""
        """Why profiles are not kept on disk; empty while they are."""

    def open(self) -> Profile:
        """Takes the directory and loads the default profile; returns it, blank where there was none."""
        if self._directory is not None:
            try:
                self._directory.open()
            except StateError as error:
                self._troubled(error)
        with self._lock:
            return self._obtain(self.default)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Saves a last time and gives the directory back."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.save()
        if self._directory is not None:
            self._directory.close()

    def _run(self) -> None:
        while not self._end.wait(self._seconds or None):
            self.save()

    def begin(self, name: str | None) -> None:
        """What is routed from now on teaches this profile: None is the default, `NOBODY` none. Engine thread."""
        with self._lock:
            self._taught = None if name == NOBODY else self._obtain(name or self.default)

    def observe(self, layer: int, ids: Sequence[int], phase: Phase) -> None:
        """A route. Engine thread; an observer of `steering`."""
        if self._taught is not None:
            self._taught.add(layer, ids, len(ids))

    def end(self, n_tokens: int) -> None:
        """The request is over; it computed so many tokens. Engine thread."""
        with self._lock:
            taught, self._taught = self._taught, None
            if taught is None or not n_tokens:
                return
            taught.tokens += n_tokens
            taught.updated = time.time()
            taught.version = __version__
            if self._known.get(taught.name) is taught:
                self._dirty.add(taught.name)

    def check(self, name: str) -> None:
        """Raises RequestError for what is no name, StateError when there are as many profiles as may be."""
        check_name(name)
        with self._lock:
            if name not in self._known and not self._on_disk(name) and len(self.names()) >= MAX_PROFILES:
                raise StateError(f"there are {MAX_PROFILES} profiles, as many as may be", hint="delete some")

    def names(self) -> list[str]:
        """Of all profiles, in memory or on disk; sorted."""
        with self._lock:
            return sorted({*self._known, *(self._directory.names() if self._directory else ())})

    def _on_disk(self, name: str) -> bool:
        return self._directory is not None and hot.is_name(name) and self._directory.file(name).exists()

    def _find(self, name: str) -> Profile | None:
        """From memory, else from disk; None where there is none that can be used. Under the lock."""
        found = self._known.get(name)
        if found is None and self._on_disk(name):
            assert self._directory is not None
            found = self._directory.load(name, self.shape)
            if found is not None:
                self._known[name] = found
        return found

    def _obtain(self, name: str) -> Profile:
        """As `_find`, else a blank one."""
        found = self._find(name)
        if found is None:
            found = self._known[name] = Profile.empty(name, self.shape)
        return found

    def get(self, name: str) -> Profile:
        """A copy. ProfileNotFoundError."""
        with self._lock:
            found = self._find(name)
            if found is None:
                raise ProfileNotFoundError(f"there is no profile {name[:80]!r}", hint="see `expertd profile list`")
            return found.copy()

    def list(self) -> list[dict[str, Any]]:
        """One row a profile, by name."""
        with self._lock:
            return [self._row(p) for n in self.names() if (p := self._find(n)) is not None]

    def _row(self, p: Profile) -> dict[str, Any]:
        return {**summary(p), "default": p.name == self.default, "saved": p.name not in self._dirty}

    def put(self, profile: Profile) -> bool:
        """Adds or replaces one. StateError for another model's. Whether it was saved, too."""
        check_model(profile, self.shape)
        self.check(profile.name)
        with self._lock:
            self._replace(profile.copy())
        return self._save(profile.name)

    def _replace(self, profile: Profile) -> None:
        old = self._known.get(profile.name)
        self._known[profile.name] = profile
        self._dirty.add(profile.name)
        if old is not None and self._taught is old:
            self._taught = profile

    def clear(self, name: str, source: str = "") -> None:
        """Starts one afresh; it is not saved before it has learnt something."""
        self.check(name)
        with self._lock:
            self._replace(Profile.empty(name, self.shape))
            self._known[name].sources = (source,) if source else ()
            self._dirty.discard(name)

    def merge(self, names: Sequence[str], into: str) -> bool:
        """The sum of several under one name; they stay. Whether it was saved."""
        return self.put(hot.merge(check_name(into, param="into"), [self.get(n) for n in names]))

    def rename(self, name: str, to: str) -> bool:
        """StateError when the new name is taken."""
        check_name(to, param="to")
        profile = self.get(name).copy(to)
        with self._lock:
            if to in self.names():
                raise StateError(f"there is a profile {to!r} already", hint="delete it first")
        saved = self.put(profile)
        self.delete(name)
        return saved

    def delete(self, name: str) -> None:
        """For good, on disk too. ProfileNotFoundError, StateError. A running request that teaches it goes on in vain;
        of the default a blank one takes its place at the next request."""
        with self._disk:
            self.get(name)
            if self._directory is not None:
                self._directory.delete(name)
            with self._lock:
                self._known.pop(name, None)
                self._dirty.discard(name)

    def save(self) -> None:
        """Writes what changed. A failure is logged once until it passes; nothing is lost from memory."""
        with self._lock:
            names = sorted(self._dirty)
        for name in names:
            if not self._save(name):
                return

    def _save(self, name: str) -> bool:
        if self._directory is None:
            return False
        with self._disk:
            with self._lock:
                if name not in self._dirty:
                    return True
                profile = self._known[name].copy()
                self._dirty.discard(name)
            try:
                self._directory.open()
                self._directory.write(profile)
            except StateError as error:
                self.save_failures += 1
                self._troubled(error)
                with self._lock:
                    if name in self._known:
                        self._dirty.add(name)
                return False
        self.saves += 1
        self.saved_at = time.time()
        if self.trouble:
            log.info("profiles are saved again")
            self.trouble = ""
        return True

    def _troubled(self, error: StateError) -> None:
        if not self.trouble:
            log.warning("profiles are kept in memory only: %s", error.line())
        self.trouble = error.line()


def summary(p: Profile) -> dict[str, Any]:
    """A profile without its counts, and how concentrated they are, as JSON-ready data."""
    chances = p.chances()
    return {
        "name": p.name, "model": p.shape.model, "fingerprint": p.shape.fingerprint, "tokens": p.tokens,
        "experts": sum(1 for c in chances if c), "created": p.created, "updated": p.updated, "expertd": p.version,
        "sources": list(p.sources), "share": hot.concentration(chances, len(chances)).json(),
    }  # fmt: skip
