"""Whether to steer, by size: pure. What follows from the choice is `session`'s.

1. `off` and `on` are obeyed; `on` for a model without experts is refused. Weights are repacked where they fit: a copy
   of a model that is larger than the memory would be killed for it.
2. `auto` without experts: refused, since there is nothing to steer and other servers do that well.
3. `auto` where weights, KV cache and compute buffers fit into the memory that is there, with room to spare: off, and
   the weights may be repacked.
4. `auto` else: on, weights left in the mapping.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.errors import ModelUnsupportedError
from expertd.units import format_size

_ROOM_SHARE = 0.05
_ROOM_NBYTES = 1 << 30
"""Room to spare beside the model: what the machine's other processes may come to want."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`steer` decides; `why` says it in one sentence. `repack` allows a copy of the weights in a faster layout."""

    steer: bool
    why: str
    repack: bool = False


def choose(
    wanted: str, name: str, *, model_nbytes: int, expert_nbytes: int, other_nbytes: int, usable_nbytes: int
) -> Choice:
    """`other_nbytes` are KV cache and compute buffers, `usable_nbytes` what the machine and its cgroup leave.

    Raises ModelUnsupportedError for a model without experts unless steering is off.
    """
    need = model_nbytes + other_nbytes
    room = usable_nbytes - need - max(_ROOM_NBYTES, int(_ROOM_SHARE * usable_nbytes))
    if wanted == "off":
        return Choice(False, "steering is off: as set", repack=room >= 0)
    if not expert_nbytes:
        raise ModelUnsupportedError(
            f"{name} is a dense model: it has no experts, so steering gives nothing",
            hint="serve it with --steering off, or take a Mixture-of-Experts model",
        )
    if wanted == "on":
        return Choice(True, "steering is on: as set")
    if room >= 0:
        return Choice(
            False,
            f"steering is off: the model needs {format_size(need)} and {format_size(usable_nbytes)} can be used, so it "
            "fits with room to spare; weights are repacked for speed",
            repack=True,
        )
    return Choice(
        True,
        f"steering is on: the model needs {format_size(need)} of the {format_size(usable_nbytes)} that can be used",
    )
