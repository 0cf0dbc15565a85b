"""Who may be addressed and from where: Host headers against DNS rebinding, Origins for CORS. Pure.

Bound to loopback, only loopback names (and those allowed by name) are answered: a web page cannot reach the daemon by
pointing its own name at 127.0.0.1. Origins on localhost may call; others only where they are listed.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from expertd.server.settings import ServerSettings

CORS_METHODS = b"GET, POST, OPTIONS"
CORS_MAX_AGE = b"600"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[: header.find("]") + 1]
    return header.partition(":")[0]


class Neighbourhood:
    """The rules of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._guarded = is_loopback(settings.host)
        self._hosts = frozenset(h.lower() for h in settings.allowed_hosts)
        self._origins = frozenset(o.rstrip("/").lower() for o in settings.cors_origins)

    def host_allowed(self, header: str | None) -> bool:
        if not self._guarded or header is None:
            return True
        name = host_name(header.strip().lower())
        return is_loopback(name) or name in self._hosts or "*" in self._hosts

    def origin_allowed(self, origin: str, host: str | None) -> bool:
        """Whether a page from `origin` may read answers: localhost, listed, or the daemon's own pages."""
        origin = origin.strip().rstrip("/").lower()
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if parts.scheme not in ("http", "https"):
            return False
        return is_loopback(name) or (host is not None and parts.netloc == host.strip().lower())

    @property
    def refuses_foreign_origins(self) -> bool:
        """On loopback a foreign page may not even write."""
        return self._guarded
