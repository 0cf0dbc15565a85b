"""A recorded trace as a series of tokens, each with the experts that every layer took.

Reads the route CSV (`turn,phase,step,layer,slot,expert,...` after `#` lines). Forcing the routes upon a model is
`forcing`'s, replaying them without a model `cache.replay`'s.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from expertd.errors import BenchError, StateError

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
    try:
        with path.open(newline="") as file:
            return _parse(file, path)
    except OSError as e:
        raise StateError(f"cannot read the trace {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise StateError(f"{path} is no trace: it is not text", hint="give a route CSV") from e


def _parse(lines: Iterable[str], path: Path) -> Routes:
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    if not {"turn", "phase", "step", "layer", "expert"} <= set(reader.fieldnames or ()):
        raise StateError(f"{path} is no trace: its first line does not name turn, phase, step, layer and expert")
    tokens: dict[tuple[int, int], dict[int, list[int]]] = {}
    in_prompt = set()
    for key, phase, layer, expert in _rows(reader, path):
        tokens.setdefault(key, {}).setdefault(layer, []).append(expert)
        if phase == 0:
            in_prompt.add(key)
    if not tokens:
        raise StateError(f"{path} holds no routes")
    widths = {len(ids) for token in tokens.values() for ids in token.values()}
    if len(widths) > 1:
        raise StateError(f"{path}: tokens route to {min(widths)} to {max(widths)} experts; one number is needed")
    return Routes(
        tokens=tuple({layer: tuple(ids) for layer, ids in token.items()} for token in tokens.values()),
        prompt_tokens=len(in_prompt),
        k=widths.pop(),
        n_layers=1 + max(layer for token in tokens.values() for layer in token),
        n_experts=1 + max(e for token in tokens.values() for ids in token.values() for e in ids),
    )


def _rows(reader: csv.DictReader[str], path: Path) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    for row in reader:
        try:
            key = (int(row["turn"]), int(row["step"]))
            values = key, int(row["phase"]), int(row["layer"]), int(row["expert"])
        except (TypeError, ValueError) as e:
            raise StateError(f"{path}, line {reader.line_num} after its head, is no route") from e
        if min(values[2:]) < 0:
            raise StateError(f"{path}, line {reader.line_num} after its head, is no route")
        yield values
