"""Who may call: API keys and the admin key, compared in constant time.

Not here: reading them from files (`config`) and refusing requests (`guard`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The keys in force. The event loop's; `replace` takes new ones without a restart."""

    def __init__(self, api_keys: Iterable[str] = (), admin_key: str = "") -> None:
        self.replace(api_keys, admin_key)

    def replace(self, api_keys: Iterable[str], admin_key: str) -> None:
        """New keys from now on; requests that were let in go on."""
        self._keys = tuple(_digest(k) for k in api_keys if k)
        self._admin = (_digest(admin_key),) if admin_key else ()

    @property
    def required(self) -> bool:
        """Whether reads need a key."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def admits(self, given: str | None) -> bool:
        """Whether this key may read: an API key or the admin key."""
        return _matches(given, self._keys + self._admin)

    def admits_admin(self, given: str | None) -> bool:
        return _matches(given, self._admin)


def _matches(given: str | None, digests: tuple[bytes, ...]) -> bool:
    """All are compared, so that the time tells nothing of which one matched, or of how far."""
    if given is None:
        return False
    mine = _digest(given)
    found = False
    for digest in digests:
        found |= hmac.compare_digest(mine, digest)
    return found
