"""Reads a recorded trace from a file, in the daemon's binary form or as columns; the first bytes tell which.

What the forms hold is `trace_file`'s and `cache.trace`'s.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

from expertd.cache.trace import LayerRoute, Trace, make_trace, parse_columns
from expertd.errors import StateError
from expertd.runtime.trace_file import MAGIC, Route, read_header, read_routes
from expertd.types import Phase


def load_trace(path: Path) -> Trace:
    """The trace at `path`. StateError says what is wrong with it, naming the line where there are lines."""
    try:
        with path.open("rb") as file:
            if file.peek(len(MAGIC))[: len(MAGIC)] == MAGIC:
                return _binary(file, str(path))
            return parse_columns(io.TextIOWrapper(file, encoding="utf-8"), str(path))
    except OSError as error:
        raise StateError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StateError(f"{path} is no trace: it is neither expertd's nor text",
                         hint="give a file of `expertd trace export` or a route CSV") from error  # fmt: skip


def _binary(file: BinaryIO, name: str) -> Trace:
    header = read_header(file, name)
    try:
        layers, experts, k = (int(header.get(key) or 0) for key in ("layers", "experts", "experts_used"))
        sizes = {int(layer): int(nbytes) for layer, nbytes in dict(header.get("expert_bytes") or {}).items()}
        model = str(header.get("model", ""))
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(f"{name}: its header is torn") from error
    routes = [_route(r, k) for r in read_routes(file) if r.ids]
    return make_trace(name, routes, model=model, n_layers=layers, n_experts=experts, expert_bytes=sizes)


def _route(r: Route, k: int) -> LayerRoute:
    """A record; how many tokens it is follows from k."""
    n_tokens = len(r.ids) // k if k and len(r.ids) % k == 0 else 1
    return LayerRoute(0, r.step, r.layer, Phase.PREFILL if r.phase == 0 else Phase.DECODE, r.ids, n_tokens)
