"""How many prompt tokens to compute at once. Each micro-batch of a prompt reads nearly all experts anew, so wide ones
read less; what they cost is memory, which experts could have had.
"""

from __future__ import annotations

from collections.abc import Callable

DEFAULT_UBATCH = 512
WIDE_UBATCHES = (2048, 1024)
MEMORY_SHARE = 0.02
"""What a wide one may cost."""


def widest(n_ctx: int, memory_nbytes: int, cost_nbytes: Callable[[int], int]) -> int:
    """Tokens: the widest micro-batch that costs at most 2 % of the memory more than the usual one, and that the context
    can hold. `cost_nbytes` gives compute buffer and KV cache for a width."""
    usual = min(DEFAULT_UBATCH, n_ctx)
    most = cost_nbytes(usual) + int(memory_nbytes * MEMORY_SHARE)
    return next((n for n in WIDE_UBATCHES if n <= n_ctx and cost_nbytes(n) <= most), usual)
