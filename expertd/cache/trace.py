"""A recorded trace as data, and its column form: which experts every layer took, token by token.

The columns are `turn,phase,step,layer,slot,expert,weight,residency,expert_bytes`, one row a routed expert, after `#`
lines of which `# layer=N expert_bytes=B` give sizes. Some recorders write a prompt token by token, some layer by layer:
rows of one layer whose steps follow each other are one batch, as the router computed it.

Pure: opening files, and the daemon's binary form, are `runtime.trace_load`'s; replaying is `cache.replay`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from expertd.errors import StateError
from expertd.types import Phase

_COLUMNS = ("turn", "phase", "step", "layer", "expert")
_MOST_INDEX = 0xFFFF
_MOST_EXPERTS = 1 << 22


@dataclass(frozen=True, slots=True)
class LayerRoute:
    """What one layer's router picked: k expert indices for each of `n_tokens` tokens in turn, of which `step` is the
    first."""

    turn: int
    step: int
    layer: int
    phase: Phase
    ids: tuple[int, ...]
    n_tokens: int = 1

    def tokens(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(step, ids) by token."""
        k = len(self.ids) // self.n_tokens
        return ((self.step + i, self.ids[i * k : (i + 1) * k]) for i in range(self.n_tokens))


@dataclass(frozen=True, slots=True)
class Trace:
    """`routes` in the order in which they were computed; `expert_bytes` is what one expert of a layer takes, by layer,
    as far as the recorder told."""

    name: str
    model: str
    n_layers: int
    n_experts: int
    k: int
    expert_bytes: dict[int, int]
    routes: tuple[LayerRoute, ...]

    def selected(self, phase: Phase | None) -> tuple[LayerRoute, ...]:
        """The routes of one phase; None is both."""
        return self.routes if phase is None else tuple(r for r in self.routes if r.phase == phase)

    def n_tokens(self, phase: Phase) -> int:
        return len({(r.turn, step) for r in self.routes if r.phase == phase for step, _ in r.tokens()})

    def sizes(self) -> list[int]:
        """Bytes by expert id. StateError where a layer that routes has no size."""
        unknown = {r.layer for r in self.routes if r.layer not in self.expert_bytes}
        if unknown:
            raise StateError(f"{self.name}: says nothing of the size of layer {min(unknown)}'s experts",
                             hint="add a line '# layer=N expert_bytes=B' for each layer")  # fmt: skip
        sizes: list[int] = []
        for layer in range(self.n_layers):
            sizes += [self.expert_bytes.get(layer, 0)] * self.n_experts
        return sizes


def make_trace(
    name: str,
    routes: Sequence[LayerRoute],
    *,
    model: str = "",
    n_layers: int = 0,
    n_experts: int = 0,
    expert_bytes: dict[int, int],
) -> Trace:
    """A trace whose shape is as told, or as its routes need. StateError where there are none, or where they and the
    shape do not go together."""
    if not routes:
        raise StateError(f"{name} holds no routes")
    layers = max(n_layers, 1 + max(r.layer for r in routes))
    named = 1 + max(max(r.ids) for r in routes)
    if n_experts and named > n_experts:
        raise StateError(f"{name}: names expert {named - 1} of a model with {n_experts} a layer")
    experts = n_experts or named
    if layers * experts > _MOST_EXPERTS:
        raise StateError(f"{name}: {layers} layers of {experts} experts are more than any model has")
    widths: dict[int, int] = {}
    for r in routes:
        k = len(r.ids) // r.n_tokens
        widths[k] = widths.get(k, 0) + r.n_tokens
    sizes = {layer: n for layer, n in expert_bytes.items() if 0 <= layer < layers and n > 0}
    return Trace(name, model, layers, experts, max(widths, key=lambda k: widths[k]), sizes, tuple(routes))


def parse_columns(lines: Iterable[str], name: str) -> Trace:
    """A trace from the lines of its column form. StateError names the line that is none."""
    head = _Head()
    columns: list[int] = []
    size_column = -1
    batches = _Batches()
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            head.take(line)
            continue
        cells = line.strip().split(",")
        if cells == [""]:
            continue
        if not columns:
            if not set(_COLUMNS) <= set(cells):
                raise StateError(f"{name} is no trace: its first line does not name {', '.join(_COLUMNS)}")
            columns = [cells.index(c) for c in _COLUMNS]
            size_column = cells.index("expert_bytes") if "expert_bytes" in cells else -1
            continue
        try:
            turn, phase, step, layer, expert = (int(cells[c]) for c in columns)
            nbytes = int(cells[size_column]) if size_column >= 0 else 0
            batches.take(turn, Phase(phase), step, layer, expert)
        except (ValueError, IndexError) as error:
            raise StateError(f"{name}, line {number} is no route") from error
        if nbytes > head.seen.get(layer, 0):
            head.seen[layer] = nbytes
    if not columns:
        raise StateError(f"{name} is no trace: it has no line that names the columns")
    return make_trace(name, batches.finish(), model=head.model, n_layers=head.number("n_layer"),
                      n_experts=head.number("n_expert"), expert_bytes=head.seen | head.sizes)  # fmt: skip


@dataclass(slots=True)
class _Head:
    """The `#` lines: words of the form key=value."""

    words: dict[str, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """By layer, from the rows; a row of an expert that was resident may say 0."""

    def take(self, line: str) -> None:
        words = dict(w.split("=", 1) for w in line[1:].split() if "=" in w)
        layer, nbytes = words.get("layer", ""), words.get("expert_bytes", "")
        if layer.isdecimal() and nbytes.isdecimal():
            self.sizes[int(layer)] = int(nbytes)
        else:
            self.words.update(words)

    @property
    def model(self) -> str:
        """A file's name without the folder it lay in."""
        return self.words.get("model", "").rsplit("/", 1)[-1]

    def number(self, key: str) -> int:
        text = self.words.get(key, "")
        return int(text) if text.isdecimal() and len(text) < 10 else 0


class _Batches:
    """Puts rows together: into tokens, and a prompt's tokens into batches."""

    def __init__(self) -> None:
        self._routes: list[LayerRoute] = []
        self._key: tuple[int, Phase, int, int] | None = None
        self._ids: list[int] = []
        self._batch: list[tuple[int, ...]] = []
        self._batch_key: tuple[int, Phase, int, int] | None = None

    def take(self, turn: int, phase: Phase, step: int, layer: int, expert: int) -> None:
        """A row. ValueError where a number is out of its range."""
        if not (0 <= layer <= _MOST_INDEX and 0 <= expert <= _MOST_INDEX and step >= 0):
            raise ValueError
        key = (turn, phase, step, layer)
        if key != self._key:
            self._end_token()
            self._key = key
        self._ids.append(expert)

    def _end_token(self) -> None:
        if self._key is None:
            return
        ids, self._ids = tuple(self._ids), []
        if self._batch_key is not None:
            b_turn, b_phase, b_step, b_layer = self._batch_key
            follows = self._key == (b_turn, b_phase, b_step + len(self._batch), b_layer)
            if follows and b_phase == Phase.PREFILL and len(ids) == len(self._batch[0]):
                self._batch.append(ids)
                return
        self._end_batch()
        self._batch, self._batch_key = [ids], self._key

    def _end_batch(self) -> None:
        if self._batch_key is not None:
            turn, phase, step, layer = self._batch_key
            flat = tuple(i for ids in self._batch for i in ids)
            self._routes.append(LayerRoute(turn, step, layer, phase, flat, len(self._batch)))

    def finish(self) -> list[LayerRoute]:
        self._end_token()
        self._end_batch()
        return self._routes
