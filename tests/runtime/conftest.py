"""A running service on the built-in model (or another), and what a request gives as plain values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from expertd.engine.requests import Finished, GenerationRequest, Piece, Sampling
from expertd.engine.settings import EngineSettings
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings

Serve = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
def serve(demo_model: Path) -> Serve:
    """`async with serve(budget_share=0.5) as service`: a ready service; settings as keywords, those of the engine as
    `engine={...}`."""

    @asynccontextmanager
    async def started(
        model: Path = demo_model, engine: dict[str, object] | None = None, **settings: object
    ) -> AsyncIterator[Service]:
        values = {"n_ctx": 512, "n_ubatch": 64, **(engine or {})}
        settings.setdefault("steering", "on")
        service = Service(RuntimeSettings(EngineSettings(model, **values), **settings))  # type: ignore[arg-type]
        service.start()
        while service.state in ("loading", "warming"):
            await service.wait_changed()
        assert service.state == "ready", service.failure
        try:
            yield service
        finally:
            assert await service.stop()

    return started


async def answer(service: Service, text: str, max_tokens: int = 32, **request: object) -> tuple[str, Finished]:
    """The greedy reply to a raw prompt, and the last event."""
    request.setdefault("sampling", Sampling(temperature=0))
    prompt = tuple(service.tokenize(text, add_special=True, parse_special=True))
    reply = ""
    async for event in service.generate(GenerationRequest(prompt, max_tokens, **request)):  # type: ignore[arg-type]
        if isinstance(event, Piece):
            reply += event.text
        if isinstance(event, Finished):
            return reply, event
    raise AssertionError("no Finished event")


def plain_words(
    model: Path, prompts: Sequence[str], max_tokens: int, *, repack: bool = False, n_ctx: int = 512, n_ubatch: int = 64
) -> list[str]:
    """What plain llama-cpp-python answers, mapped, with flash attention as `auto` has it; with weights as they are in
    the file, or repacked. Both choices change the order of sums, which turns near ties on some processors."""
    import llama_cpp

    def parameters() -> Any:
        found = defaults()
        found.use_extra_bufts = repack
        return found

    defaults = llama_cpp.llama_model_default_params
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", parameters)
        llama = llama_cpp.Llama(str(model), n_ctx=n_ctx, n_ubatch=n_ubatch, flash_attn=True, verbose=False)
    assert llama.model_params.use_extra_bufts == repack
    texts = []
    for prompt in prompts:
        reply: list[int] = []
        for token in llama.generate(llama.tokenize(prompt.encode(), add_bos=True, special=True), temp=0.0):
            if llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llama.model), token):
                break
            reply.append(token)
            if len(reply) == max_tokens:
                break
        texts.append(llama.detokenize(reply).decode())
    llama.close()
    return texts
