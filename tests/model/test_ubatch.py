"""The width of a prompt's micro-batches follows the memory that it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expertd.model.ubatch import DEFAULT_UBATCH, MEMORY_SHARE, WIDE_UBATCHES, widest

GIB = 1 << 30


def test_much_memory_gives_the_widest() -> None:
    assert widest(4096, 32 * GIB, lambda n: n * 100_000) == 2048


def test_a_wide_one_that_costs_too_much_is_not_taken() -> None:
    assert widest(4096, GIB, lambda n: n * 30_000) == 1024
    assert widest(4096, GIB, lambda n: n * 100_000) == DEFAULT_UBATCH


def test_the_context_bounds_it() -> None:
    assert widest(1500, 32 * GIB, lambda n: n) == 1024
    assert widest(100, 32 * GIB, lambda n: n) == 100


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_never_wider_than_the_context_nor_dearer_than_its_share(n_ctx: int, memory: int, per_token: int) -> None:
    chosen = widest(n_ctx, memory, lambda n: n * per_token)
    usual = min(DEFAULT_UBATCH, n_ctx)
    assert chosen in (usual, *WIDE_UBATCHES)
    assert chosen <= n_ctx
    assert (chosen - usual) * per_token <= memory * MEMORY_SHARE
