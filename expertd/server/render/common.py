"""What the renderers share: usage, timings and receipt as JSON, ids, and the answer as it adds up."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from expertd.runtime.requests import Finished, PromptProgress, Queued, TokenLogprob
from expertd.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from expertd.server.wire import comment

_LETTERS = string.ascii_letters + string.digits


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def new_call_id() -> str:
    """Nine letters and digits: the one form that Mistral's templates take, and nobody minds."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(slots=True)
class Call:
    """A tool call of this answer."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Answer:
    """All that has come so far."""

    content_parts: list[str] = field(default_factory=list)
    reasoning_parts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content_parts.append(text)
                case Reasoning(text):
                    self.reasoning_parts.append(text)
                case CallStart(_, name):
                    self.calls.append(Call(new_call_id(), name))
                case CallArguments(number, text):
                    self.calls[number].parts.append(text)

    @property
    def content(self) -> str:
        return "".join(self.content_parts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)


def finish_reason(finished: Finished, *, calls: bool) -> str:
    """OpenAI's word for how it ended. Time's end is a length, too: the answer is cut."""
    if finished.reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def usage(finished: Finished) -> dict[str, Any]:
    generated = finished.timings.predicted_n
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": finished.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": finished.timings.cache_n},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """llama-server's object. Milliseconds."""
    t = finished.timings
    return {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": round(t.prompt_ms, 3),
        "prompt_per_token_ms": round(t.prompt_ms / t.prompt_n, 3) if t.prompt_n else 0.0,
        "prompt_per_second": round(t.prompt_per_second, 3),
        "predicted_n": t.predicted_n,
        "predicted_ms": round(t.predicted_ms, 3),
        "predicted_per_token_ms": round(t.predicted_ms / t.predicted_n, 3) if t.predicted_n else 0.0,
        "predicted_per_second": round(t.predicted_per_second, 3),
    }


def receipt(finished: Finished) -> dict[str, Any]:
    """The root `expertd` object: what the answer cost."""
    r = finished.receipt
    return {
        "expert_requests": r.expert_requests,
        "expert_hits": r.expert_hits,
        "bytes_read": r.bytes_read,
        "io_wait_ms": None if r.io_wait_ms is None else round(r.io_wait_ms, 3),
        "major_faults": r.major_faults,
        "queue_ms": round(finished.queue_ms, 3),
        "first_token_ms": round(finished.first_token_ms, 3),
    }


def bill(finished: Finished) -> dict[str, Any]:
    """The two objects that every answer carries."""
    return {"timings": timings(finished), "expertd": receipt(finished)}


def queued_comment(event: Queued) -> bytes:
    return comment(f"queued position={event.position}")


def progress_comment(event: PromptProgress) -> bytes:
    return comment(f"prompt {event.done}/{event.total} cached={event.cached}")


def progress_object(event: PromptProgress, ms: float) -> dict[str, Any]:
    """llama-server's `prompt_progress`."""
    return {"total": event.total, "cache": event.cached, "processed": event.done, "time_ms": round(ms)}


def token_text(token: TokenLogprob) -> str:
    return token.piece.decode("utf-8", "replace")


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's chat form: the text, its bytes, the log probability and the likeliest others."""
    return [{**_token(t), "top_logprobs": [_token(o) for o in t.top]} for t in tokens]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token), "bytes": list(token.piece), "logprob": max(token.logprob, -9999.0)}
