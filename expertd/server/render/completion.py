"""`/v1/completions`: text as it comes, with OpenAI's older form of log probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from expertd.errors import ExpertdError
from expertd.runtime.requests import Finished, PromptProgress, Queued, TokenLogprob
from expertd.server.errors import openai_body
from expertd.server.output.deltas import Content, Delta
from expertd.server.render.common import (
    bill,
    finish_reason,
    new_id,
    progress_comment,
    progress_object,
    queued_comment,
    token_text,
    usage,
)
from expertd.server.wire import DONE, data, encode

_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionRenderer:
    """One answer. `echo` is text that comes first."""

    def __init__(
        self, model: str, fingerprint: str, *, stream: bool, usage: bool, logprobs: bool, progress: bool, echo: str = ""
    ) -> None:
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._stream, self._usage, self._logprobs, self._progress = stream, usage, logprobs, progress
        self._echo, self._offset = echo, len(echo)
        self._parts: list[str] = [echo] if echo else []
        self._tokens: list[TokenLogprob] = []
        self._began = time.perf_counter()
        self._start = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":0,"text":'

    def begin(self) -> bytes:
        return self._chunk(self._echo) if self._echo else b""

    def queued(self, event: Queued) -> bytes:
        out = queued_comment(event)
        return out + self._chunk("", queue_position=event.position) if self._progress else out

    def progress(self, event: PromptProgress) -> bytes:
        out = progress_comment(event)
        if self._progress:
            ms = (time.perf_counter() - self._began) * 1000
            out += self._chunk("", prompt_progress=progress_object(event, ms))
        return out

    def add(self, deltas: Sequence[Delta], logprobs: tuple[TokenLogprob, ...]) -> bytes:
        text = "".join([d.text for d in deltas if isinstance(d, Content)])
        self._tokens += logprobs
        if not self._stream:
            self._parts.append(text)
            return b""
        if not text:
            return b""
        if self._logprobs:
            return self._chunk(text, logprobs=self._take_logprobs())
        return self._start + encode(text) + _TAIL

    def _take_logprobs(self) -> dict[str, Any]:
        tokens, self._tokens = self._tokens, []
        texts = [token_text(t) for t in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(t.logprob, -9999.0) for t in tokens],
            "top_logprobs": [{token_text(o): max(o.logprob, -9999.0) for o in t.top} for t in tokens],
            "text_offset": offsets,
        }

    def _chunk(
        self, text: str, *, finish: str | None = None, logprobs: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return data({**self._head, "choices": [choice], **more})

    def finish(self, finished: Finished) -> bytes:
        reason = finish_reason(finished, calls=False)
        left = self._take_logprobs() if self._tokens else None
        if not self._usage:
            return self._chunk("", finish=reason, logprobs=left, **bill(finished)) + DONE
        last = data({**self._head, "choices": [], "usage": usage(finished), **bill(finished)})
        return self._chunk("", finish=reason, logprobs=left) + last + DONE

    def failed(self, error: ExpertdError) -> bytes:
        return data(openai_body(error))

    def whole(self, finished: Finished) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "".join(self._parts),
            "logprobs": self._take_logprobs() if self._logprobs else None,
            "finish_reason": finish_reason(finished, calls=False),
        }
        return {**self._head, "choices": [choice], "usage": usage(finished), **bill(finished)}
