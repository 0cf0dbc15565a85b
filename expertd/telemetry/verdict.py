"""What holds the answers up now, in a sentence, and what to do. Pure: a `Window` of figures in, a `Verdict` out.

The decision (`decide`), the first that holds:
1. starting: the model loads or warms.
2. idle: nobody asks.
3. I/O does not bind (less than 40 % of the working time goes to the disk; 20 % where 4a holds, since one setting
   cures that):
   3a. queue: requests wait longer than they are worked for;
   3b. contention: our threads wait for a processor for more than a third of the time that they could run;
   3c. prompt: most of the time computes prompts;
   3d. compute.
4. I/O binds:
   4a. read_ahead: the disk's read-ahead is large and far more is read than was asked for;
   4b. pressure: the kernel takes pages that are in use, the budget had to shrink, or swap fills;
   4c. cold: the cache is still filling;
   4d. prompt: most of the time goes to prompts, which touch nearly every expert;
   4e. topic: hits fell well below what is usual here;
   4f. disk: nearly everything hits or most experts fit, or the disk is slow, and still it binds;
   4g. memory: the experts in use do not fit.
Thrashing is a matter beside the cause: see `_thrashing`. Windows are taken by `watch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from expertd.units import format_size

CAUSES = (
    "starting", "idle", "compute", "queue", "contention", "prompt",
    "read_ahead", "pressure", "cold", "topic", "disk", "memory",
)  # fmt: skip

_IO_BINDS = 0.4
_READ_AHEAD_BINDS = 0.2
_MOSTLY = 0.6
# Some waiting is usual: the event loop and the pager run beside as many engine threads as there are cores.
_CONTENDED = 1 / 3
_LARGE_READ_AHEAD_KB = 1024
_SLOW_DISK = 400e6
# Order of a fault's wait on an NVMe disk; a slower disk shows in the other two estimates.
_FAULT_SECONDS = 100e-6
_LEAST_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in the last `seconds`. Bytes and seconds; `*_before` is the most of the last minutes.
    `prompt_seconds` and `generation_seconds` are parts of `seconds`."""

    seconds: float = 10.0
    state: str = "ready"
    steering: bool = True
    in_flight: int = 0
    queued: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    queue_seconds: float = 0.0
    wait_seconds: float = 0.0
    requests: int = 0
    hits: int = 0
    usual_hit_ratio: float | None = None
    miss_nbytes: int = 0
    read_nbytes: int = 0
    read_since_start_nbytes: int = 0
    refault_nbytes: int = 0
    """File pages read again soon after the kernel took them."""
    major_faults: int = 0
    disk_rate: float | None = None
    """Bytes a second that the disk can give, where it was measured."""
    read_ahead_kb: int | None = None
    evicted: int = 0
    dropped: int = 0
    """Experts that the kernel took, not we."""
    capacity_nbytes: int = 0
    capacity_before_nbytes: int = 0
    budget_auto: bool = True
    resident_nbytes: int = 0
    expert_nbytes: int = 0
    model_nbytes: int = 0
    stall_seconds: float | None = None
    cpu_seconds: float = 0.0
    cpu_wait_seconds: float = 0.0
    """Time that our threads ran, and that they could have run and waited for a processor."""
    swap_grown_nbytes: int = 0

    @property
    def _counted_seconds(self) -> float:
        return self.prompt_seconds + self.generation_seconds

    @property
    def in_prompt(self) -> bool:
        """Whether a prompt is under way that has not been counted yet: prompts count when their request ends."""
        return self.in_flight > 0 and self._counted_seconds < self.seconds / 2

    @property
    def busy_seconds(self) -> float:
        """Time the engine worked."""
        return max(self._counted_seconds, self.seconds) if self.in_prompt else self._counted_seconds

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @property
    def hit_ratio(self) -> float | None:
        """None where too little was asked to tell."""
        return self.hits / self.requests if self.requests >= _LEAST_REQUESTS else None

    @property
    def prompt_share(self) -> float:
        """Of the working time."""
        return 1 - self.generation_seconds / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def io_share(self) -> float:
        """Of the working time, that which the disk takes: the largest of three estimates, at most 1."""
        if not self.busy_seconds:
            return 0.0
        seconds = [self.wait_seconds, self.major_faults * _FAULT_SECONDS]
        if self.disk_rate:
            seconds.append(self.read_nbytes / self.disk_rate)
        return min(1.0, max(seconds) / self.busy_seconds)

    @property
    def cpu_wait_share(self) -> float:
        """Of the time that our threads could run, that in which other tasks had the processor."""
        return self.cpu_wait_seconds / max(1e-9, self.cpu_seconds + self.cpu_wait_seconds)

    @property
    def read_per_token(self) -> float:
        return self.read_nbytes / max(1, self.tokens)

    @property
    def over_read(self) -> float:
        """Bytes read for each byte that was missed. Infinite where nothing was missed and yet much was read."""
        if self.miss_nbytes:
            return self.read_nbytes / self.miss_nbytes
        return float("inf") if self.read_nbytes > 1 << 20 else 0.0

    @property
    def refaulted(self) -> bool:
        """Whether much of what was read had just been taken by the kernel."""
        return self.refault_nbytes > 0.3 * self.read_nbytes

    @property
    def filling(self) -> bool:
        """Whether the cache still has room, and takes in without giving up."""
        goal = min(self.capacity_nbytes, self.expert_nbytes)
        return self.evicted == 0 and self.resident_nbytes < 0.9 * goal


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` is one of CAUSES; `sentence` says what is, `advice` what to do (empty where there is nothing to do)."""

    cause: str
    sentence: str
    advice: str = ""
    thrashing: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        return f"{self.sentence} {self.advice}".strip()


STARTING = Verdict("starting", "The model is being loaded.")


def decide(w: Window) -> Verdict:
    """The bottleneck of this window, by the list above."""
    if w.state != "ready":
        return _starting(w)  # 1
    if not w.in_flight and not w.queued and not w.tokens:
        return Verdict("idle", "Nothing is asked.")  # 2
    binds = w.io_share >= (_READ_AHEAD_BINDS if _reads_too_far(w) else _IO_BINDS)
    cause = _io_cause(w) if binds else _work_cause(w)
    sentence, advice = _WORDS[cause](w)
    return Verdict(cause, sentence, advice, _thrashing(w), _figures(w))


def _starting(w: Window) -> Verdict:
    if w.state == "warming":
        return Verdict("starting", "The model is loaded; its warm-up, or the rehearsal that is required, is not over.")
    if w.state == "failed":
        return Verdict("starting", "The model could not be loaded.", "`journalctl -u expertd` or the log says why.")
    return Verdict("starting", "The daemon is stopping.") if w.state == "stopping" else STARTING


def _work_cause(w: Window) -> str:
    if w.queued and w.queue_seconds > w.busy_seconds:
        return "queue"  # 3a
    if w.cpu_wait_share > _CONTENDED:
        return "contention"  # 3b
    return "prompt" if w.prompt_share > _MOSTLY else "compute"  # 3c, 3d


def _io_cause(w: Window) -> str:
    ratio = w.hit_ratio
    if _reads_too_far(w):
        return "read_ahead"  # 4a
    if _pressed(w):
        return "pressure"  # 4b
    if w.steering and w.filling:
        return "cold"  # 4c
    if not w.steering and w.read_since_start_nbytes < w.model_nbytes and not w.refaulted:
        return "cold"  # 4c: each page was read at most once so far
    if w.prompt_share > _MOSTLY:
        return "prompt"  # 4d
    if ratio is not None and w.usual_hit_ratio is not None and w.usual_hit_ratio - ratio > 0.15:
        return "topic"  # 4e
    most_fits = w.capacity_nbytes >= 0.9 * w.expert_nbytes > 0
    if (ratio is not None and ratio >= 0.9) or most_fits or (w.disk_rate and w.disk_rate < _SLOW_DISK):
        return "disk"  # 4f
    return "memory"  # 4g


def _reads_too_far(w: Window) -> bool:
    large = w.read_ahead_kb is not None and w.read_ahead_kb >= _LARGE_READ_AHEAD_KB
    return large and (not w.steering or w.over_read > 1.5)


def _pressed(w: Window) -> bool:
    """Steering gives up experts before the kernel must; so any sign of the kernel's reclaim comes from elsewhere, or
    from a budget above what there is. Without steering, reclaim is how it works and tells nothing."""
    if w.swap_grown_nbytes > 64 << 20:
        return True
    if not w.steering:
        return False
    shrunk = w.budget_auto and w.capacity_nbytes < 0.9 * w.capacity_before_nbytes
    stalled = w.stall_seconds is not None and w.stall_seconds > 0.2 * w.seconds
    taken = w.dropped > max(4, 0.02 * (w.requests - w.hits)) or w.refault_nbytes > max(64 << 20, 0.1 * w.read_nbytes)
    return shrunk or stalled or taken


def _thrashing(w: Window) -> bool:
    """The same pages are read again and again: the disk binds, the cache is not merely filling, and
    1. steered: faults, and the kernel took what was held or twice the missed bytes are read; or hardly anything hits;
    2. not steered: faults by the score for each token, of pages that the kernel has just taken, or after more was read
       than the model has."""
    if w.io_share < _IO_BINDS or w.tokens == 0:
        return False
    faults = w.major_faults / w.tokens
    if w.steering:
        ratio = w.hit_ratio
        faulted = faults >= 10 and (w.refaulted or w.over_read >= 2 or w.dropped > 4)
        return not w.filling and (faulted or (ratio is not None and ratio < 0.3 and w.io_share > 0.8))
    return faults >= 20 and (w.refaulted or w.read_since_start_nbytes > 1.2 * w.model_nbytes)


def _figures(w: Window) -> dict[str, float]:
    found = {
        "io_share": w.io_share,
        "prompt_share": w.prompt_share,
        "read_bytes_per_token": w.read_per_token,
        "read_bytes_per_second": w.read_nbytes / w.seconds if w.seconds else 0.0,
        "major_faults_per_token": w.major_faults / max(1, w.tokens),
    }
    if w.hit_ratio is not None:
        found["hit_ratio"] = w.hit_ratio
    if w.generation_seconds:
        found["tokens_per_second"] = w.generated_tokens / w.generation_seconds
    return found


def _reads(w: Window) -> str:
    return f"{w.io_share:.0%} of the time goes to the disk, {format_size(w.read_per_token)} a token"


def _hits(w: Window) -> str:
    return "" if w.hit_ratio is None else f"; {w.hit_ratio:.0%} of the experts hit"


def _compute(w: Window) -> tuple[str, str]:
    return (
        f"Compute: {w.io_share:.0%} of the time goes to the disk, the rest to the processor{_hits(w)}.",
        "Threads as many as physical cores, a smaller quantisation or a faster machine would help.",
    )


def _queue(w: Window) -> tuple[str, str]:
    return (
        f"Queue: {w.queued} requests wait, longer than they are worked for.",
        "Send fewer at once, limit max_tokens, or run a second daemon on another machine.",
    )


def _contention(w: Window) -> tuple[str, str]:
    return (
        f"Contention: the daemon's threads wait for a processor for {w.cpu_wait_share:.0%} of the time they could run.",
        "End other work on this machine, or set engine.threads below the number of cores that are free.",
    )


def _prompt(w: Window) -> tuple[str, str]:
    tokens = f"{w.prompt_tokens} tokens" if w.prompt_tokens else "one under way"
    disk = f", {format_size(w.read_nbytes)} read" if w.io_share >= _IO_BINDS else ""
    return (
        f"Prompt: {w.prompt_share:.0%} of the time goes to prompts ({tokens}{disk}).",
        "Shorter prompts, or a prefix that stays the same between turns, is reused; a larger n_ubatch reads less.",
    )


def _read_ahead(w: Window) -> tuple[str, str]:
    times = "" if not w.miss_nbytes else f", {w.over_read:.1f} times what was asked for"
    return (
        f"Read-ahead: the disk reads {w.read_ahead_kb} KiB at each fault{times}.",
        "Set read_ahead_kb of the model's disk to 128; `expertd doctor MODEL` names the file.",
    )


def _pressure(w: Window) -> tuple[str, str]:
    lost = w.capacity_before_nbytes - w.capacity_nbytes
    shrunk = f" the budget lost {format_size(lost)};" if lost > 0.1 * w.capacity_before_nbytes else ""
    return (
        f"Pressure: another process takes the memory, or the budget is above what is left;{shrunk} {_reads(w)}.",
        "End or limit the other process, protect this one (MemoryLow), or lower the budget.",
    )


def _cold(w: Window) -> tuple[str, str]:
    goal = min(w.capacity_nbytes, w.expert_nbytes)
    full = f", {w.resident_nbytes / goal:.0%} filled" if goal else ""
    return (
        f"Cold start: the experts in use are being read for the first time{full}; {_reads(w)}.",
        "It passes by itself; `expertd warm` or a profile avoids it.",
    )


def _topic(w: Window) -> tuple[str, str]:
    usual = w.usual_hit_ratio or 0.0
    return (
        f"Topic changed: other experts are needed than before{_hits(w)}, {usual:.0%} is usual here.",
        "It passes by itself; a profile for each topic, warmed before, avoids it.",
    )


def _disk(w: Window) -> tuple[str, str]:
    rate = f" of {format_size(w.disk_rate)}/s" if w.disk_rate else ""
    return (
        f"Disk: {_reads(w)}, from a disk{rate}{_hits(w)}.",
        "A faster disk for the model file, or enough memory for all experts, would help.",
    )


def _memory(w: Window) -> tuple[str, str]:
    held = f"{format_size(w.capacity_nbytes)} of {format_size(w.expert_nbytes)} of experts fit"
    if not w.steering:
        held = "the model does not fit and steering is off"
    return (
        f"Memory: {held}; {_reads(w)}{_hits(w)}.",
        "More memory, a smaller quantisation, or fewer other programs would help."
        + ("" if w.steering else " Start with --steering on."),
    )


_WORDS = {
    "compute": _compute,
    "queue": _queue,
    "contention": _contention,
    "prompt": _prompt,
    "read_ahead": _read_ahead,
    "pressure": _pressure,
    "cold": _cold,
    "topic": _topic,
    "disk": _disk,
    "memory": _memory,
}
