"""A recorded trace as a series of tokens, each with the experts that every layer took.

Reading the file is `runtime.trace_load`'s, forcing the routes upon a model `forcing`'s, replaying them without a model
`cache.replay`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertd.errors import BenchError, StateError
from expertd.runtime.trace_load import load_trace
from expertd.types import Phase

TokenRoutes = dict[int, tuple[int, ...]]
"""Experts by layer, in the order of their slots."""


@dataclass(frozen=True, slots=True)
class Routes:
    """`tokens` in order, the prompt's first; `prompt_tokens` of them are a prompt's. k experts a token a layer."""

    tokens: tuple[TokenRoutes, ...]
    prompt_tokens: int
    k: int
    n_layers: int
    n_experts: int

    def check_fits(self, *, layers: int, experts: int, k: int) -> None:
        """Raises BenchError when these routes cannot be forced upon a model of that shape. Layers that the model lacks
        are left out; those that the trace lacks repeat the layer below it."""
        if self.k != k:
            raise BenchError(f"the trace routes {self.k} experts a token, the model {k}", hint=f"give --used {self.k}")
        if self.n_experts > experts:
            raise BenchError(f"the trace names expert {self.n_experts - 1}, the model has {experts}")
        if layers < 1:
            raise BenchError("the model has no layer that routes")


def load(path: Path) -> Routes:
    """Read a trace. Raises StateError, naming the line, when it is none."""
    trace = load_trace(path)
    tokens: dict[tuple[int, int], TokenRoutes] = {}
    in_prompt = set()
    for route in trace.routes:
        for step, ids in route.tokens():
            token = tokens.setdefault((route.turn, step), {})
            token[route.layer] = token.get(route.layer, ()) + ids
            if route.phase == Phase.PREFILL:
                in_prompt.add((route.turn, step))
    widths = {len(ids) for token in tokens.values() for ids in token.values()}
    if len(widths) > 1:
        raise StateError(f"{path}: tokens route to {min(widths)} to {max(widths)} experts; one number is needed")
    return Routes(
        tokens=tuple(tokens.values()),
        prompt_tokens=len(in_prompt),
        k=widths.pop(),
        n_layers=1 + max(layer for token in tokens.values() for layer in token),
        n_experts=1 + max(e for token in tokens.values() for ids in token.values() for e in ids),
    )
