"""How many bytes of experts may be resident: a pure controller that follows the memory there is, and its sampler.

The aim is the largest budget that the kernel never has to take from: a fifth less loses what steering wins, a little
more lets reclaim throw out what is about to be used. What is available is measured, not modelled: anonymous and kernel
memory, KV and compute buffers are what they are.

`BudgetController.step`, on each sample:
1. The target is what is free or reclaimable where it is scarcest (machine or tightest cgroup), plus the pinned experts
   (they count as taken there), less dense weights that are not locked, what a prompt is about to take, and a reserve.
   All file pages count as available: those of others that are in use come back by 3.
2. The reserve holds what a step reads before evictions catch up, and what a limit needs to not be touched.
3. Where the kernel took pages that were needed again (refaults), swapped, or let tasks stall, a margin is added to
   the reserve at once; it melts away, a little at each quiet sample.
4. Down at once. Up to the smallest target of the last samples, so that memory that was free for a moment is not taken.
5. Changes of less than half a percent are none.
6. Never below one step's experts, never above all of them. Where the target lies below what is pinned, pins go first
   (`pin_limit_bytes`), and at nothing left the locks of dense weights (`release_dense`).

Who evicts when the budget shrinks: `cache`, told by `runtime`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from expertd.pages import memory

_STEP_SHARE = 0.005
_CALM_SAMPLES = 3
# Shares of what is there; those of number 3 hold for a second of pressure or of quiet.
_MARGIN_MOST = 0.30
_MARGIN_STEP = 0.04
_MARGIN_KEPT = 0.85
# Below this refaults are borders and strangers.
_REFAULT_SHARE = 0.008
_STALL_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Sample:
    """What one look at the machine gave. Bytes; refaults, swap and stall since the look before."""

    seconds: float
    limit_bytes: int
    available_bytes: int
    pinned_bytes: int
    dense_unlocked_bytes: int
    coming_bytes: int = 0
    refault_bytes: int = 0
    swapped_out_bytes: int = 0
    stall_seconds: float = 0.0


def reserve_for(limit_bytes: int, step_bytes: int) -> int:
    """Bytes to leave alone: what one layer of one token reads before its evictions are done, half as much again for
    those that wait, at least 8 MiB and half a percent of the limit."""
    return max(8 << 20, step_bytes * 3 // 2, limit_bytes // 200)


class BudgetController:
    """Pure: samples in, budgets out. One thread. Sizes in bytes.

    `floor_bytes` is what one step needs, `ceiling_bytes` all experts, `step_bytes` the experts that one layer of one
    token reads, `pin_budget_bytes` what may be pinned at most.
    """

    def __init__(self, floor_bytes: int, ceiling_bytes: int, step_bytes: int, pin_budget_bytes: int = 0) -> None:
        self._floor, self._ceiling, self._step = min(floor_bytes, ceiling_bytes), ceiling_bytes, step_bytes
        self.pin_budget_bytes = pin_budget_bytes
        self._margin = 0.0
        self._targets: deque[int] = deque(maxlen=_CALM_SAMPLES)
        self.budget_bytes = 0
        self.target_bytes = 0
        """What the last sample had room for, however many experts there are."""
        self.pin_limit_bytes = pin_budget_bytes
        self.release_dense = False
        self.shrinks = 0
        self.grows = 0
        self.pressed = 0

    @property
    def margin_bytes(self) -> int:
        """What 3 holds back at the moment."""
        return int(self._margin)

    def step(self, sample: Sample) -> int | None:
        """The new budget, or None to leave it. The first sample always gives one."""
        room = sample.available_bytes + sample.pinned_bytes - sample.dense_unlocked_bytes - sample.coming_bytes
        room -= reserve_for(sample.limit_bytes, self._step)
        self._press(sample, max(room, 0))
        target = self.target_bytes = room - int(self._margin)
        self._targets.append(target)
        self.pin_limit_bytes = max(0, min(self.pin_budget_bytes, target - self._floor))
        self.release_dense = target < self._floor // 2
        budget, first = self.budget_bytes, not self.budget_bytes
        wanted = target if target < budget or first else max(budget, min(self._targets))
        wanted = max(self._floor, min(self._ceiling, wanted))
        if not first and len(self._targets) < _CALM_SAMPLES and wanted > budget:
            return None
        edge = wanted in (self._floor, self._ceiling)
        if wanted == budget or (abs(wanted - budget) < budget * _STEP_SHARE and not edge):
            return None
        self.shrinks += wanted < budget
        self.grows += wanted > budget and not first
        self.budget_bytes = wanted
        return wanted

    def _press(self, sample: Sample, room: int) -> None:
        """Number 3: grow the margin by what was taken, at least by a step; else let it melt."""
        taken = sample.refault_bytes + sample.swapped_out_bytes
        seconds = min(max(sample.seconds, 1e-3), 1.0)
        if taken > room * _REFAULT_SHARE * seconds or sample.stall_seconds > _STALL_SHARE * max(sample.seconds, 1e-3):
            self.pressed += 1
            step = room * _MARGIN_STEP * seconds
            self._margin = min(self._margin + max(step, min(taken, 4 * step)), room * _MARGIN_MOST)
        else:
            kept = min(self._margin, room * _MARGIN_MOST) * _MARGIN_KEPT**seconds
            self._margin = kept if kept > room * _STEP_SHARE else 0.0


class Sampler:
    """Takes samples from /proc and cgroup files, some 0.5 ms each. One thread."""

    def __init__(self, root: Path = memory.ROOT, clock: Callable[[], float] = monotonic) -> None:
        self._root, self._clock = root, clock
        self._levels = memory.cgroup_levels(root)
        self._before = memory.reclaim(root, self._levels)
        self._stall = self._at = 0.0
        self.last: memory.MemorySnapshot | None = None

    def sample(self, pinned_bytes: int, dense_unlocked_bytes: int, coming_bytes: int = 0) -> Sample:
        """`pinned_bytes`: experts that are locked. `dense_unlocked_bytes`: dense weights that are not. `coming_bytes`:
        anonymous memory that is about to be taken."""
        now, at = memory.snapshot(self._root, self._levels), self._clock()
        reclaimed = memory.reclaim(self._root, self._levels)
        stall = now.pressure.some_seconds if now.pressure is not None else 0.0
        first = self.last is None
        refaulted = 0 if first else max(0, reclaimed.refault_bytes - self._before.refault_bytes)
        # Tasks in other cgroups stall at their own limits; that is none of our concern as long as nothing of ours went.
        ours = now.pressure is not None and (refaulted > 0 or not now.pressure.machine)
        taken = Sample(
            seconds=at - self._at,
            limit_bytes=now.limit_bytes,
            available_bytes=now.usable_bytes,
            pinned_bytes=pinned_bytes,
            dense_unlocked_bytes=dense_unlocked_bytes,
            coming_bytes=coming_bytes,
            refault_bytes=refaulted,
            swapped_out_bytes=0 if first else max(0, reclaimed.swapped_out_bytes - self._before.swapped_out_bytes),
            stall_seconds=max(0.0, stall - self._stall) if ours and not first else 0.0,
        )
        self.last, self._before, self._stall, self._at = now, reclaimed, stall, at
        return taken
