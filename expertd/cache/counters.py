"""The cache's counters: plain integers that the telemetry floor renders when it is scraped."""

from __future__ import annotations

from dataclasses import dataclass, field

ADMISSION_CAUSES = ("route", "prompt", "predict", "warm", "pin")
EVICTION_CAUSES = ("route", "predict", "warm", "pin", "resize", "dropped", "transient", "request")


@dataclass(slots=True)
class Counters:
    """Since the cache was made. A request is one expert wanted by one layer of one token; in a prompt's batch it is
    one expert wanted by one layer of the batch, whatever number of tokens wants it."""

    requests: int = 0
    hits: int = 0
    request_bytes: int = 0
    hit_bytes: int = 0
    prompt_requests: int = 0
    """Of `requests`, those of prompts; likewise `prompt_hits`."""
    prompt_hits: int = 0
    out_of_range: int = 0
    """Ids dropped because the model has no such expert."""
    predicted: int = 0
    """Experts fetched on a prediction; `predicted_used` of them were routed while resident, `predicted_wasted`
    were evicted unused."""
    predicted_used: int = 0
    predicted_wasted: int = 0
    admissions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ADMISSION_CAUSES, 0))
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTION_CAUSES, 0))
    layer_hits: list[int] = field(default_factory=list)
    layer_misses: list[int] = field(default_factory=list)

    @property
    def misses(self) -> int:
        return self.requests - self.hits

    @property
    def hit_ratio(self) -> float:
        """0 where nothing was requested."""
        return self.hits / self.requests if self.requests else 0.0
