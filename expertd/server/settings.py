"""How the server listens and whom it answers, as data.

Not here: where the values come from (`config`), and keys, which may change while the server runs (`keys`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from expertd.runtime.requests import Sampling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Sizes are bytes, times are seconds; 0 or None is no limit where that makes sense."""

    host: str = "127.0.0.1"
    port: int = 8642
    """0 takes a free one."""
    socket_path: Path | None = None
    """Unix socket, on which everybody who can open it may use the admin verbs."""
    api_keys: tuple[str, ...] = ()
    admin_key: str = ""
    max_body_nbytes: int = 16 << 20
    max_tokens: int | None = None
    """Most tokens that one answer may have."""
    request_seconds: float = 0.0
    """Longest time for one answer."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers accepted besides loopback names while bound to loopback."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call, besides those on localhost."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    drain_seconds: float = 10.0
    """Time for running answers to end at a stop."""
    keepalive_seconds: float = 10.0
    """Silence on a stream after which a comment is sent."""
    stall_seconds: float = 60.0
    """A client that takes nothing for so long is dropped."""
    header_seconds: float = 10.0
    """Time to send the request's head."""
    body_seconds: float = 60.0
    """Time to send the request's body."""
    max_connections: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    """What a request gets where it says nothing."""
