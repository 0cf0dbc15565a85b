"""Steering changes where pages are, never what is said; and its own figures are the kernel's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from expertd.engine.settings import EngineSettings
from expertd.errors import BudgetError, ModelUnsupportedError
from expertd.pages import libc, residency
from expertd.runtime.choice import choose
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings
from tests.runtime.conftest import Serve, answer, plain_words

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWrite a poem about coal.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_the_words_are_the_same_at_every_budget_steered_or_not(serve: Serve, demo_model: Path, policy: str) -> None:
    async def words(**settings: object) -> list[str]:
        async with serve(**settings) as service:
            return [(await answer(service, prompt, 48))[0] for prompt in PROMPTS]

    expected = plain_words(demo_model, PROMPTS, 48)
    assert any(expected)
    for share in (0.25, 0.5, 1.0):
        assert asyncio.run(words(budget_share=share, policy=policy)) == expected
    assert asyncio.run(words(steering="off")) == plain_words(demo_model, PROMPTS, 48, repack=True)


def test_below_the_expert_bytes_experts_are_missed_and_evicted_and_the_budget_is_kept(serve: Serve) -> None:
    async def report() -> dict[str, object]:
        async with serve(budget_share=0.25) as service:
            for prompt in PROMPTS:
                await answer(service, prompt)
            return service.cache_report()

    found = asyncio.run(report())
    assert found["misses"] > 0
    assert found["evictions"] > 0
    assert found["hits"] > 0
    assert found["resident_bytes"] <= found["budget_bytes"]
    assert found["requests"] == found["hits"] + found["misses"]
    assert sum(layer["requests"] for layer in found["layers"]) == found["requests"]


@pytest.mark.linux65
def test_the_caches_figure_of_resident_bytes_is_the_kernels(serve: Serve, big_model: Path) -> None:
    """Within five percent, at several moments of a generation."""

    async def compare() -> list[tuple[int, int]]:
        _drop(big_model)
        seen = []
        async with serve(big_model, budget_share=0.4) as service:
            for prompt in PROMPTS:
                await answer(service, prompt, 24)
                seen.append(_both(service))
        return seen

    for believed, kernel in asyncio.run(compare()):
        assert believed > 0
        assert abs(believed - kernel) <= 0.05 * believed


def _both(service: Service) -> tuple[int, int]:
    """Bytes of the pages that the admitted experts touch, and of those in the page cache of all expert tensors."""
    steering = service.steering
    assert steering is not None
    assert steering.worker.drain(10)
    layout, mapping = steering.layout, steering.pager.mapping
    pages: set[int] = set()
    for expert in steering.read(lambda cache: cache.resident()):
        for e in layout.extents(expert):
            pages.update(range(e.offset // libc.PAGE, -(-e.end // libc.PAGE)))
    kernel = 0
    for t in (t for m in layout.layers for t in m.tensors):
        resident = residency.resident_pages(mapping.files[0], t.offset, t.stride * layout.n_experts)
        assert resident is not None
        kernel += resident * libc.PAGE
    return len(pages) * libc.PAGE, kernel


def _drop(model: Path) -> None:
    fd = os.open(model, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.linux65
def test_what_is_resident_at_the_start_is_adopted_and_kept(serve: Serve, big_model: Path) -> None:
    big_model.read_bytes()

    async def adopted() -> tuple[dict[str, object], int, int]:
        async with serve(big_model, budget_share=0.5) as service:
            before = service.cache_report()
            _, kernel_before = _both(service)
            await answer(service, PROMPTS[0], 4)
            return before, kernel_before, _both(service)[1]

    before, kernel_before, kernel_after = asyncio.run(adopted())
    assert before["resident_bytes"] > 0.95 * before["budget_bytes"]
    assert kernel_before > 0.95 * big_model.stat().st_size * 0.9, "beyond the budget nothing goes before it must"
    assert kernel_after <= kernel_before


def test_a_model_that_is_wholly_resident_is_sampled_not_tapped(serve: Serve) -> None:
    async def counters() -> tuple[int, int]:
        async with serve(budget_share=1.0) as service:
            steering = service.steering
            assert steering is not None
            steering.act(lambda cache: cache.admit(range(len(cache.sizes))))
            for prompt in PROMPTS * 2:
                await answer(service, prompt, 60, ignore_eos=True)
            tap = service.session.tap  # type: ignore[union-attr]
            assert tap is not None
            before = tap.counters.splits, tap.counters.skipped
            await answer(service, PROMPTS[0], 64, ignore_eos=True)
            return tap.counters.splits - before[0], tap.counters.skipped - before[1]

    splits, skipped = asyncio.run(counters())
    assert skipped > 8 * 50
    assert 0 < splits < 8 * 16


@pytest.mark.parametrize(("share", "calm"), [(1.0, True), (0.999, False)])
def test_where_the_budget_holds_all_it_is_sampled_from_the_start(serve: Serve, share: float, calm: bool) -> None:
    async def splits() -> int:
        async with serve(budget_share=share) as service:
            steering = service.steering
            assert steering is not None
            steering.act(lambda cache: cache.admit(range(len(cache.sizes))))
            await answer(service, PROMPTS[0], 50, ignore_eos=True)
            tap = service.session.tap  # type: ignore[union-attr]
            assert tap is not None
            return tap.counters.splits

    assert (asyncio.run(splits()) < 8 * 25) is calm


def test_a_budget_below_one_tokens_need_is_refused(demo_model: Path) -> None:
    async def start() -> str:
        service = Service(RuntimeSettings(EngineSettings(demo_model, n_ctx=256), steering="on", budget=100_000))
        service.start()
        while service.state == "loading":
            await service.wait_changed()
        await service.stop()
        return service.failure

    failure = asyncio.run(start())
    assert "below the" in failure
    assert "--budget" in failure
    assert BudgetError.exit_code == 2


def test_the_choice_follows_size_and_says_why() -> None:
    gib = 1 << 30
    fits = choose("auto", "m", model_nbytes=4 * gib, expert_nbytes=3 * gib, other_nbytes=gib, usable_nbytes=16 * gib)
    tight = choose("auto", "m", model_nbytes=15 * gib, expert_nbytes=12 * gib, other_nbytes=gib, usable_nbytes=16 * gib)
    assert (fits.steer, tight.steer) == (False, True)
    assert "fits with room to spare" in fits.why
    assert choose("on", "m", model_nbytes=1, expert_nbytes=1, other_nbytes=0, usable_nbytes=16 * gib).steer
    large = choose("off", "m", model_nbytes=99 * gib, expert_nbytes=1, other_nbytes=0, usable_nbytes=gib)
    assert not large.steer
    assert not large.repack, "a copy of what does not fit would be killed"
    assert choose("off", "m", model_nbytes=gib, expert_nbytes=1, other_nbytes=0, usable_nbytes=16 * gib).repack
    with pytest.raises(ModelUnsupportedError, match="dense"):
        choose("auto", "m", model_nbytes=1, expert_nbytes=0, other_nbytes=0, usable_nbytes=gib)
