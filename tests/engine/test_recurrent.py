"""S5 on models whose state cannot be cut back, recurrent and hybrid: reuse never changes what is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.engine.context import Cancelled
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.requests import GenerationRequest, Piece, PromptProgress, Sampling
from expertd.engine.settings import EngineSettings
from tests.engine.conftest import Bench, make_bench
from tests.engine.recurrent_models import write_random

ONE = tuple(range(300, 350))
OTHER = tuple(range(400, 450))


@pytest.fixture(scope="module", params=["mamba", "granitehybrid", "qwen3next"])
def recurrent(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    start_backend()
    path = write_random(request.param, demo_model, tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf")
    model = LoadedModel(EngineSettings(path))
    assert model.recurrent
    yield model
    model.close()
    path.unlink()


@pytest.fixture
def bench(recurrent: LoadedModel) -> Iterator[Bench]:
    made = make_bench(recurrent, saved=64 << 20, n_ctx=256, n_ubatch=32, threads=1, threads_batch=1)
    yield made
    made.context.close()


def say(bench: Bench, prompt: tuple[int, ...], *, reuse: bool = True) -> tuple[tuple[int, ...], int]:
    """The greedy answer's tokens, and how many of the prompt were reused."""
    request = GenerationRequest(prompt, 12, sampling=Sampling(temperature=0), ignore_eos=True, cache_prompt=reuse)
    run = bench.generation.run(request)
    tokens: list[int] = []
    while True:
        try:
            event = next(run)
        except StopIteration as end:
            return tuple(tokens), end.value.timings.cache_n
        tokens += event.tokens if isinstance(event, Piece) else ()


def test_the_same_prompt_gives_the_same_words_whatever_is_kept(bench: Bench) -> None:
    expected, _ = say(bench, ONE, reuse=False)
    other, _ = say(bench, OTHER, reuse=False)
    assert expected != other
    assert len(set(expected)) > 1
    for _ in range(2):
        assert say(bench, ONE)[0] == expected
        assert say(bench, ONE)[0] == expected
        assert say(bench, OTHER)[0] == other
        assert say(bench, OTHER, reuse=False)[0] == other


def test_a_conversation_that_was_left_goes_on_as_one_that_was_not(bench: Bench) -> None:
    first, _ = say(bench, ONE, reuse=False)
    second = (*ONE, *first, 7, 8, 9)
    expected, reused = say(bench, second)
    assert reused > len(ONE), "the state after the answer is where the next turn begins"
    bench.conversations.forget()
    assert say(bench, ONE, reuse=False)[0] == first
    say(bench, OTHER)
    got, again = say(bench, second)
    assert again == reused
    assert bench.conversations.counters.restored == 1
    assert got == expected


def test_after_a_cancel_nothing_of_it_is_left(bench: Bench) -> None:
    expected, _ = say(bench, ONE, reuse=False)
    run = bench.generation.run(GenerationRequest(OTHER * 3, 12, sampling=Sampling(temperature=0)))
    assert isinstance(next(run), PromptProgress)
    assert isinstance(next(run), PromptProgress)
    thread = threading.Thread(target=bench.context.cancel)
    thread.start()
    thread.join()
    with pytest.raises(Cancelled):
        next(run)
    bench.context.clear_cancel()
    assert say(bench, ONE)[0] == expected
