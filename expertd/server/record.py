"""What is known of one request when it is over: the access line, and the counts by route and status.

Never a prompt, a key or an answer. The event loop's.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from expertd.runtime.requests import Finished

access = logging.getLogger("expertd.access")
RECORD = "expertd.record"
"""The record's place in the ASGI scope."""


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Record:
    """One request. `finish` is how its generation ended; empty where there was none."""

    request_id: str
    method: str
    path: str
    client: str
    began: float = field(default_factory=time.perf_counter)
    route: str = ""
    status: int = 0
    finish: str = ""
    first_token_ms: float | None = None
    finished: Finished | None = None

    def saw_token(self) -> None:
        """The first token is on its way to the client."""
        if self.first_token_ms is None:
            self.first_token_ms = (time.perf_counter() - self.began) * 1000

    def fields(self) -> dict[str, Any]:
        """For the log, as JSON."""
        out: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "client": self.client,
            "status": self.status,
            "ms": round((time.perf_counter() - self.began) * 1000, 1),
        }
        if self.finish:
            out["finish"] = self.finish
        if (done := self.finished) is not None:
            cost = done.receipt
            out |= {
                "prompt_tokens": done.prompt_tokens,
                "cached_tokens": done.timings.cache_n,
                "tokens": done.timings.predicted_n,
                "tokens_per_second": round(done.timings.predicted_per_second, 2),
                "queue_ms": round(done.queue_ms, 1),
                "hit_ratio": round(cost.expert_hits / cost.expert_requests, 4) if cost.expert_requests else None,
                "bytes_read": cost.bytes_read,
            }
        if self.first_token_ms is not None:
            out["ttft_ms"] = round(self.first_token_ms, 1)
        return out

    def log(self) -> None:
        """The access line."""
        fields = self.fields()
        level = logging.DEBUG if self.route in _QUIET and self.status < 400 else logging.INFO
        if access.isEnabledFor(level):
            words = " ".join(f"{k}={v}" for k, v in fields.items() if k not in ("method", "path", "status"))
            access.log(level, "%s %s %d %s", self.method, self.path, self.status, words, extra={"fields": fields})


_QUIET = frozenset(
    {
        "/health", "/livez", "/readyz", "/metrics", "/static/{path:path}",
        "/expertd/series", "/expertd/heatmap", "/expertd/experts",
    }
)  # fmt: skip
