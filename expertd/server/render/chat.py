"""`/v1/chat/completions`: the object in one piece, and the stream of chunks.

Order of a stream: the role with content ""; deltas; an empty delta with the finish reason; with `include_usage` a
chunk without choices; `[DONE]`. The last chunk before it carries timings and receipt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from expertd.errors import ExpertdError
from expertd.runtime.requests import Finished, PromptProgress, Queued, TokenLogprob
from expertd.server.errors import openai_body
from expertd.server.output.deltas import CallStart, Content, Delta, Reasoning
from expertd.server.render.common import (
    Answer,
    bill,
    chat_logprobs,
    finish_reason,
    new_id,
    progress_comment,
    progress_object,
    queued_comment,
    usage,
)
from expertd.server.wire import DONE, data, encode

_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatRenderer:
    """One answer. `stream` False adds up only."""

    def __init__(
        self, model: str, fingerprint: str, *, stream: bool, usage: bool, logprobs: bool, progress: bool
    ) -> None:
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._stream, self._usage, self._logprobs, self._progress = stream, usage, logprobs, progress
        self._answer = Answer()
        self._began = time.perf_counter()
        start = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":0,"delta":{'
        self._content, self._reasoning = start + b'"content":', start + b'"reasoning_content":'

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def queued(self, event: Queued) -> bytes:
        out = queued_comment(event)
        return out + self._chunk({}, queue_position=event.position) if self._progress else out

    def progress(self, event: PromptProgress) -> bytes:
        out = progress_comment(event)
        if self._progress:
            ms = (time.perf_counter() - self._began) * 1000
            out += self._chunk({}, prompt_progress=progress_object(event, ms))
        return out

    def add(self, deltas: Sequence[Delta], logprobs: tuple[TokenLogprob, ...]) -> bytes:
        if not self._stream:
            self._answer.add(deltas)
            self._answer.logprobs += logprobs
            return b""
        if self._logprobs:
            self._answer.logprobs += logprobs
            return self._with_logprobs(deltas)
        return b"".join([self._plain(d) for d in deltas])

    def _plain(self, delta: Delta) -> bytes:
        if isinstance(delta, Content):
            return self._content + encode(delta.text) + _TAIL
        if isinstance(delta, Reasoning):
            return self._reasoning + encode(delta.text) + _TAIL
        return self._chunk(self._delta(delta))

    def _with_logprobs(self, deltas: Sequence[Delta]) -> bytes:
        """Log probabilities go with the first delta that comes; what comes before any waits."""
        chunks = []
        for delta in deltas:
            tokens, self._answer.logprobs = self._answer.logprobs, []
            chunks.append(self._chunk(self._delta(delta), logprobs=tokens))
        return b"".join(chunks)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        self._answer.add([delta] if isinstance(delta, CallStart) else [])
        match delta:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(number, name):
                call = {"id": self._answer.calls[number].id, "type": "function"}
                return {"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]}
            case _:
                return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
        **more: Any,
    ) -> bytes:
        shown = {"content": chat_logprobs(logprobs), "refusal": None} if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish}
        return data({**self._head, "choices": [choice], **more})

    def finish(self, finished: Finished) -> bytes:
        reason = finish_reason(finished, calls=bool(self._answer.calls))
        left = self._answer.logprobs if self._logprobs else None
        if not self._usage:
            return self._chunk({}, finish=reason, logprobs=left, **bill(finished)) + DONE
        last = data({**self._head, "choices": [], "usage": usage(finished), **bill(finished)})
        return self._chunk({}, finish=reason, logprobs=left) + last + DONE

    def failed(self, error: ExpertdError) -> bytes:
        return data(openai_body(error))

    def whole(self, finished: Finished) -> dict[str, Any]:
        answer = self._answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in answer.calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": chat_logprobs(answer.logprobs), "refusal": None} if self._logprobs else None,
            "finish_reason": finish_reason(finished, calls=bool(answer.calls)),
        }
        return {**self._head, "choices": [choice], "usage": usage(finished), **bill(finished)}
