"""A stand-in for the service, for what the real one does not do on demand: errors, silence, chosen text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from expertd.runtime.requests import Event, Finished, GenerationRequest, Piece, Receipt, Timings

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MODEL = SimpleNamespace(
    id="double", path="/models/double.gguf", fingerprint="0123456789abcdef", created=1, n_ctx=64, n_ctx_train=128,
    n_vocab=256, chat_template=CHATML, bos="", eos="", arch="double", description="a double", nbytes=1, n_params=1,
    n_layers=1, n_experts=2, n_experts_used=1, expert_nbytes=1,
)  # fmt: skip
DONE = Finished("stop", "", 3, Timings(0, 3, 1.0, 2, 1.0), Receipt(4, 3, 2, 1.0, 0), 0.5, 1.5)


@dataclass
class Double:
    """`script` is what `generate` does: events are given, errors raised, numbers slept."""

    script: Sequence[Event | BaseException | float] = (Piece("Hello", (1,)), Piece(" there", (2,)), DONE)
    model: Any = field(default_factory=lambda: MODEL)
    state: str = "ready"
    failure: str = ""
    progress: Any = field(default_factory=lambda: SimpleNamespace(what="", done=0, total=0))
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: int = 0
    rendered: list[dict[str, Any]] = field(default_factory=list)
    template_error: Exception | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> bytes:
        return bytes(ids)

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def apply_template(self, messages: list[dict[str, Any]], **names: Any) -> str:
        self.rendered.append({"messages": messages, **names})
        if self.template_error is not None:
            raise self.template_error
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, (int, float)):
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1

    def slots(self) -> list[dict[str, Any]]:
        return [{"id": 0, "is_processing": False}]

    def cache_report(self) -> dict[str, Any]:
        return {"requests": 4, "hits": 3}

    def heatmap(self) -> dict[str, Any]:
        return {"layers": [0], "n_experts": 2, "scores": [[1.0, 0.25]], "state": [[2, 0]]}
