"""How fast decoding will be, as a range with its assumptions: what a token reads, from where, at what rate.

Seconds a token = bytes from RAM / its bandwidth + bytes from VRAM / its bandwidth + missed bytes / the disk's rate + a
little for each layer, in series, since the disk and the cores take turns within a layer. Not here: where the bytes lie
(`plan`).

The share of requests that hit, for a share f of the experts held, lies between
- f itself: a router that favours nobody;
- what decayed frequency reached on a recorded trace of a 30B-A3B model: .55 at 10 %, .67 at 15 %, .83 at 25 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SKEWED = ((0.0, 0.0), (0.10, 0.55), (0.15, 0.67), (0.25, 0.83), (0.50, 0.95), (1.0, 1.0))
_GB = 10**9
# 2 cores read 13 GB/s of weights in a decode that was measured; dual channels end near 80 GB/s.
_RAM_PER_CORE = (4 * _GB, 10 * _GB)
_RAM_MOST = (40 * _GB, 80 * _GB)
_VRAM = (200 * _GB, 1000 * _GB)
_DISK = (_GB // 2, 3 * _GB)
# Starting and joining threads for each operation; a model of 8 layers and 2.4 MB a token took 0.7 ms.
_LAYER_SECONDS = (100e-6, 30e-6)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, (low, high); None takes an assumption."""

    ram: tuple[float, float] | None = None
    disk: tuple[float, float] | None = None
    physical_cores: int = 1


@dataclass(frozen=True, slots=True)
class TokenReads:
    """Bytes that one token reads: dense and experts in RAM, all that lies in VRAM; the share of experts held."""

    dense_ram: int
    experts_ram: int
    vram: int
    held: float
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens a second, and the share of expert requests that hit, each (low, high)."""

    tokens_per_second: tuple[float, float]
    hit_ratio: tuple[float, float]
    missed_bytes_per_token: tuple[int, int]
    assumptions: tuple[str, ...]


def forecast(reads: TokenReads, rates: Rates) -> Forecast:
    """The range for a decode of one sequence, warm, at the start of a context."""
    cores = max(1, rates.physical_cores)
    ram = rates.ram or (
        float(min(cores * _RAM_PER_CORE[0], _RAM_MOST[0])),
        float(min(cores * _RAM_PER_CORE[1], _RAM_MOST[1])),
    )
    disk = rates.disk or (float(_DISK[0]), float(_DISK[1]))
    hits = (min(1.0, max(0.0, reads.held)), skewed_hit_ratio(reads.held))
    missed = tuple(round(reads.experts_ram * (1 - h)) for h in hits)
    speeds = []
    for i in (0, 1):
        seconds = (reads.dense_ram + reads.experts_ram) / max(ram[i], 1.0)
        seconds += reads.layers * _LAYER_SECONDS[i] + reads.vram / _VRAM[i] + missed[i] / max(disk[i], 1.0)
        speeds.append(1 / seconds if seconds > 0 else 0.0)
    return Forecast(
        (speeds[0], speeds[1]), hits, (missed[0], missed[1]), _assumptions(reads, rates, ram, disk, hits, cores)
    )


def skewed_hit_ratio(held: float) -> float:
    """Hits for a share of the experts held, between the points of the trace."""
    at = min(1.0, max(0.0, held))
    for (x0, y0), (x1, y1) in pairwise(_SKEWED):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return 1.0


def _assumptions(
    reads: TokenReads,
    rates: Rates,
    ram: Sequence[float],
    disk: Sequence[float],
    hits: Sequence[float],
    cores: int,
) -> tuple[str, ...]:
    found = [
        f"a token reads {_gb(reads.dense_ram)} of dense weights and {_gb(reads.experts_ram)} of experts from RAM",
        f"RAM gives {_range(ram)} ({'as given' if rates.ram else f'assumed for {cores} physical cores'})",
    ]
    if reads.vram:
        found.append(f"{_gb(reads.vram)} lie in VRAM, assumed to give {_range(_VRAM)}")
    if reads.held < 1 and reads.experts_ram:
        found.append(
            f"{min(1.0, reads.held):.0%} of the experts are held: {hits[0]:.0%} (a router without favourites) to "
            f"{hits[1]:.0%} (one as skewed as a 30B-A3B's) of the requests hit"
        )
        source = "probed" if rates.disk else "assumed; --probe measures"
        found.append(f"a miss is read from the disk at {_range(disk)} ({source})")
        found.append("I/O and compute take turns; one sequence, warm")
    return tuple(found)


def _gb(nbytes: float) -> str:
    return f"{nbytes / _GB:.2f} GB"


def _range(rate: Sequence[float]) -> str:
    return f"{rate[0] / _GB:.3g} to {rate[1] / _GB:.3g} GB/s" if rate[0] != rate[1] else f"{rate[0] / _GB:.3g} GB/s"
