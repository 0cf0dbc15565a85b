"""`/v1/messages`: Anthropic's message and its stream of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from expertd.errors import ExpertdError
from expertd.runtime.requests import Finished, PromptProgress, Queued, TokenLogprob
from expertd.server.errors import anthropic_body
from expertd.server.output.deltas import Delta
from expertd.server.render.blocks import Blocks, Close, More, Open, Step
from expertd.server.render.common import bill, new_id, progress_comment, queued_comment
from expertd.server.wire import named

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesRenderer:
    """One answer. `n_prompt` is the prompt's length in tokens, told at the start."""

    def __init__(self, model: str, request_id: str, n_prompt: int, *, stream: bool) -> None:
        self._id, self._model, self._request_id = new_id("msg_"), model, request_id
        self._n_prompt, self._stream = n_prompt, stream
        self._blocks = Blocks()
        self._content: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        usage = {"input_tokens": self._n_prompt, "output_tokens": 0}
        message = self._message([], None, None, usage)
        return named("message_start", {"type": "message_start", "message": message})

    def queued(self, event: Queued) -> bytes:
        return queued_comment(event)

    def progress(self, event: PromptProgress) -> bytes:
        return progress_comment(event)

    def add(self, deltas: Sequence[Delta], logprobs: tuple[TokenLogprob, ...]) -> bytes:
        return self._steps(self._blocks.add(deltas))

    def _steps(self, steps: Sequence[Step]) -> bytes:
        return b"".join([self._step(s) for s in steps])

    def _step(self, step: Step) -> bytes:
        match step:
            case Open(index, kind, name):
                block = _empty(kind, name)
                self._content.append(block)
                event = {"type": "content_block_start", "index": index, "content_block": block}
            case More(index, kind, text):
                word, key = _DELTAS[kind]
                event = {"type": "content_block_delta", "index": index, "delta": {"type": word, key: text}}
            case Close(index, kind, text):
                self._content[index] = {**self._content[index], **_filled(kind, text)}
                event = {"type": "content_block_stop", "index": index}
        return named(str(event["type"]), event) if self._stream else b""

    def finish(self, finished: Finished) -> bytes:
        out = self._steps(self._blocks.close())
        reason, stop = self._reason(finished)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(finished), **bill(finished)}
        return out + named("message_delta", last) + named("message_stop", {"type": "message_stop"})

    def failed(self, error: ExpertdError) -> bytes:
        return named("error", anthropic_body(error, self._request_id))

    def whole(self, finished: Finished) -> dict[str, Any]:
        self._steps(self._blocks.close())
        reason, stop = self._reason(finished)
        return {**self._message(self._content, reason, stop, _usage(finished)), **bill(finished)}

    def _reason(self, finished: Finished) -> tuple[str, str | None]:
        if finished.reason != "stop":
            return "max_tokens", None
        if any(b["type"] == "tool_use" for b in self._content):
            return "tool_use", None
        return ("stop_sequence", finished.stop_text) if finished.stop_text else ("end_turn", None)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _usage(finished: Finished) -> dict[str, int]:
    cached = finished.timings.cache_n
    return {
        "input_tokens": finished.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": finished.timings.predicted_n,
    }


def _empty(kind: str, name: str) -> dict[str, Any]:
    if kind == "call":
        return {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _filled(kind: str, text: str) -> dict[str, Any]:
    if kind == "call":
        try:
            return {"input": msgspec.json.decode(text or "{}")}
        except msgspec.DecodeError:
            return {"input": {"_unparsed": text}}
    return {"thinking": text} if kind == "reasoning" else {"text": text}
