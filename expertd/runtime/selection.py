"""Which experts a person means: by profile, layers, share or single experts, hottest first. Pure.

1. Single experts (`3:17`, `3:0-15`) are those and no others.
2. Else the experts of the layers named (`0-3,7`), of all layers where none are.
3. A profile, or where none is named what is hot now, gives the order; a profile leaves out what it never saw.
4. A share takes the hottest part of these, by number.

Not here: doing something to them (`actions`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from expertd.errors import RequestError
from expertd.types import ExpertLayout

_RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")
_EXPERT = re.compile(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")


@dataclass(frozen=True, slots=True)
class Selection:
    """What was asked for. `layers` None is all layers, `share` None all of them; `experts` are expert ids."""

    profile: str | None = None
    layers: frozenset[int] | None = None
    share: float | None = None
    experts: tuple[int, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether nothing was narrowed down."""
        return not (self.profile or self.layers is not None or self.share is not None or self.experts)


def parse(
    layout: ExpertLayout,
    *,
    profile: str | None = None,
    layers: str | None = None,
    share: float | str | None = None,
    experts: Sequence[str] = (),
) -> Selection:
    """From the texts of a command line or a body. RequestError names what is off."""
    if experts and (profile or layers or share is not None):
        raise RequestError("single experts go with no other choice", hint="leave the others out", param="experts")
    return Selection(
        profile or None,
        parse_layers(layers, layout) if layers else None,
        parse_share(share) if share is not None else None,
        tuple(dict.fromkeys(e for text in experts for e in _experts(text, layout))),
    )


def parse_layers(text: str, layout: ExpertLayout) -> frozenset[int]:
    """`0-3,7` as layer numbers; those that have no experts are left out, as long as one has."""
    wanted: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise RequestError(f"{part.strip()[:40]!r} is no layer and no range", hint="write 0-3,7", param="layers")
        wanted.update(range(first, min(last, layout.n_layers) + 1))
    known = frozenset(wanted.intersection(layout.by_layer))
    if not known:
        have = f"{layout.layers[0].layer} to {layout.layers[-1].layer}"
        raise RequestError(f"no layer of {text[:40]!r} has experts", hint=f"those from {have} have", param="layers")
    return known


def parse_share(share: float | str) -> float:
    """`25%` or 0.25 as 0.25."""
    try:
        value = (
            float(share.strip().removesuffix("%")) / 100 if isinstance(share, str) and "%" in share else float(share)
        )
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise RequestError(f"{str(share)[:40]!r} is no share", hint="write 25% or 0.25", param="share")
    return value


def _experts(text: str, layout: ExpertLayout) -> range:
    found = _EXPERT.fullmatch(text)
    if found is None:
        raise RequestError(f"{text[:40]!r} is no expert", hint="write LAYER:INDEX, 3:17 or 3:0-15", param="experts")
    layer, first = int(found[1]), int(found[2])
    last = int(found[3]) if found[3] else first
    moe = layout.by_layer.get(layer)
    if moe is None or not first <= last < moe.n_experts:
        have = f"layer {layer} has {moe.n_experts} of them" if moe else f"layer {layer} has none"
        raise RequestError(f"there is no expert {text.strip()[:40]}", hint=have, param="experts")
    return range(layout.expert_id(layer, first), layout.expert_id(layer, last) + 1)


def choose(selection: Selection, layout: ExpertLayout, heat: Sequence[float]) -> list[int]:
    """Expert ids, hottest first by `heat` (by expert id); ties in the order of the file."""
    if selection.experts:
        chosen = list(selection.experts)
    else:
        layers = selection.layers if selection.layers is not None else layout.by_layer.keys()
        chosen = [
            m.layer * layout.n_experts + i for m in layout.layers if m.layer in layers for i in range(m.n_experts)
        ]
    if selection.profile:
        chosen = [e for e in chosen if heat[e] > 0.0]
    chosen.sort(key=lambda e: (-heat[e], e))
    if selection.share is not None:
        chosen = chosen[: max(1, round(selection.share * len(chosen)))]
    return chosen
