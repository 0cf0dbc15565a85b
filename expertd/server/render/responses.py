"""`/v1/responses`: OpenAI's response object and its stream of typed events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from expertd.errors import ExpertdError
from expertd.runtime.requests import Finished, PromptProgress, Queued, TokenLogprob
from expertd.server.errors import openai_body
from expertd.server.output.deltas import Delta
from expertd.server.render.blocks import Blocks, Close, More, Open, Step
from expertd.server.render.common import bill, new_call_id, new_id, progress_comment, queued_comment
from expertd.server.wire import named

_WORDS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponsesRenderer:
    """One answer. `echo` holds the fields that come back as they were sent."""

    def __init__(self, model: str, echo: dict[str, Any], *, stream: bool) -> None:
        self._id, self._model, self._echo, self._stream = new_id("resp_"), model, echo, stream
        self._created = int(time.time())
        self._blocks = Blocks()
        self._items: list[dict[str, Any]] = []
        self._number = 0

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def queued(self, event: Queued) -> bytes:
        return queued_comment(event)

    def progress(self, event: PromptProgress) -> bytes:
        return progress_comment(event)

    def add(self, deltas: Sequence[Delta], logprobs: tuple[TokenLogprob, ...]) -> bytes:
        return self._steps(self._blocks.add(deltas))

    def finish(self, finished: Finished) -> bytes:
        out = self._steps(self._blocks.close())
        response = self.whole(finished)
        return out + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ExpertdError) -> bytes:
        inner = openai_body(error)["error"]
        response = {**self._response("failed"), "error": {"code": "server_error", "message": inner["message"]}}
        return self._event("response.failed", response=response)

    def whole(self, finished: Finished) -> dict[str, Any]:
        self._steps(self._blocks.close())
        cut = finished.reason != "stop"
        generated = finished.timings.predicted_n
        usage = {
            "input_tokens": finished.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.timings.cache_n},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finished.prompt_tokens + generated,
        }
        response = self._response("incomplete" if cut else "completed")
        response |= {"output": self._items, "usage": usage}
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return {**response, **bill(finished)}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named(kind, {"type": kind, "sequence_number": self._number - 1, **fields}) if self._stream else b""

    def _steps(self, steps: Sequence[Step]) -> bytes:
        return b"".join([self._step(s) for s in steps])

    def _step(self, step: Step) -> bytes:
        match step:
            case Open(index, kind, name):
                return self._open(index, kind, name)
            case More(index, kind, text):
                return self._event(f"response.{_WORDS[kind]}.delta", **self._place(index, kind), delta=text)
            case Close(index, kind, text):
                return self._close(index, kind, text)

    def _place(self, index: int, kind: str) -> dict[str, Any]:
        place = {"item_id": self._items[index]["id"], "output_index": index}
        if kind == "text":
            return {**place, "content_index": 0, "logprobs": []}
        return place if kind == "call" else {**place, "content_index": 0}

    def _open(self, index: int, kind: str, name: str) -> bytes:
        item = _item(kind, name)
        self._items.append(item)
        out = self._event("response.output_item.added", output_index=index, item=item)
        if kind == "text":
            out += self._event(
                "response.content_part.added", item_id=item["id"], output_index=index, content_index=0, part=_part("")
            )
        return out

    def _close(self, index: int, kind: str, text: str) -> bytes:
        item = {**self._items[index], "status": "completed"}
        place = self._place(index, kind)
        if kind == "call":
            item["arguments"] = text
            out = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            item["content"] = [_part(text) if kind == "text" else {"type": "reasoning_text", "text": text}]
            out = self._event(f"response.{_WORDS[kind]}.done", **place, text=text)
        if kind == "text":
            place.pop("logprobs")
            out += self._event("response.content_part.done", **place, part=_part(text))
        self._items[index] = item
        return out + self._event("response.output_item.done", output_index=index, item=item)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(kind: str, name: str) -> dict[str, Any]:
    if kind == "call":
        call = {"call_id": f"call_{new_call_id()}", "name": name, "arguments": ""}
        return {"id": new_id("fc_"), "type": "function_call", "status": "in_progress", **call}
    if kind == "reasoning":
        return {"id": new_id("rs_"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    return {"id": new_id("msg_"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
