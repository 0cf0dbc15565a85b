"""What every endpoint can reach: the service, the settings, the keys, the counts, and a place for slow text work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from expertd.server.contract import Service
from expertd.server.keys import KeyRing
from expertd.server.record import RECORD, Record
from expertd.server.settings import ServerSettings

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Context:
    """One app's. `counts` is answers by (route, status); `stopping` is set when open streams must end."""

    service: Service
    settings: ServerSettings
    keys: KeyRing
    metrics: Callable[[], bytes]
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    status: Callable[[], Mapping[str, Any]] = dict
    """What else `/expertd/status` tells; the daemon's."""
    series: Callable[[int | None], Mapping[str, Any]] = lambda since: {}
    """What else `/expertd/series` tells; the daemon's."""
    url: str = ""
    watchers: int = 0
    """Open event streams."""
    texts: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="expertd-text")
    )

    async def in_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Templates and tokenizing, away from the event loop: both may take long, and templates are untrusted."""
        return await asyncio.get_running_loop().run_in_executor(self.texts, partial(work, *args, **kwargs))


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def record_of(request: Request) -> Record:
    record: Record = request.scope[RECORD]
    return record
