"""One loaded engine for the tests of this area; contexts are made by the tests that need their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertd.engine.context import Context
from expertd.engine.conversations import Conversations
from expertd.engine.generate import Generation, Outcome
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.requests import GenerationRequest, Piece, Sampling
from expertd.engine.settings import EngineSettings
from expertd.engine.tap import RouterTap


@dataclass
class Bench:
    """A context on the built-in model, with what a request gives as plain values."""

    model: LoadedModel
    context: Context
    conversations: Conversations
    generation: Generation
    tap: RouterTap | None = None

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.model.tokenize(text, add_special=True, parse_special=True))

    def run(self, prompt: str, max_tokens: int = 24, **request: object) -> tuple[str, list[int], Outcome]:
        """(text, tokens, outcome) of one generation, greedy unless the sampling is given."""
        request.setdefault("sampling", Sampling(temperature=0))
        run = self.generation.run(GenerationRequest(self.ids(prompt), max_tokens, **request))  # type: ignore[arg-type]
        text, tokens = "", []
        while True:
            try:
                event = next(run)
            except StopIteration as end:
                return text, tokens, end.value
            if isinstance(event, Piece):
                text += event.text
                tokens += event.tokens


def make_bench(model: LoadedModel, tap: RouterTap | None = None, *, saved: int = 0, **settings: object) -> Bench:
    values = {"n_ctx": 512, "n_ubatch": 64, **settings}
    context = Context(model, EngineSettings(model.settings.model, **values), tap)  # type: ignore[arg-type]
    conversations = Conversations(context, saved)
    return Bench(model, context, conversations, Generation(context, conversations), tap)


@pytest.fixture(scope="session")
def loaded(demo_model: Path) -> Iterator[LoadedModel]:
    start_backend()
    model = LoadedModel(EngineSettings(demo_model))
    yield model
    model.close()


@pytest.fixture
def bench(loaded: LoadedModel) -> Iterator[Bench]:
    made = make_bench(loaded)
    yield made
    made.context.close()
