"""All endpoints in one list: the app routes by it and the OpenAPI document is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from expertd.runtime.profile_file import Document
from expertd.server import replies
from expertd.server.bodies.admin import MergeBody, RehearsalBody, RenameBody, SelectionBody, TraceBody, WarmBody
from expertd.server.bodies.anthropic import MessagesBody
from expertd.server.bodies.openai import ChatBody, CompletionBody
from expertd.server.bodies.responses import ResponsesBody
from expertd.server.bodies.text import DetokenizeBody, TokenizeBody
from expertd.server.routes import admin, dashboard, generate, probes, profiles, series, text, trace, watch


@dataclass(frozen=True, slots=True)
class Query:
    """A whole number in an address's query; never required."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. `body` and `reply` are the structs of request and answer; `also` are other paths to it;
    `content` is the answer's type where it is no JSON; `streams` tells of server-sent events beside it; `query` is
    what its address may ask for."""

    method: str
    path: str
    endpoint: Callable[..., Awaitable[Any]]
    summary: str
    body: type[msgspec.Struct] | None = None
    reply: Any = None
    content: str = "application/json"
    streams: bool = False
    admin: bool = False
    open: bool = False
    errors: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    hidden: bool = False
    query: tuple[Query, ...] = ()


_WORK = (400, 408, 413, 429, 503)
_ACT = (400, 404, 408, 409, 413, 503)
OPERATIONS: tuple[Operation, ...] = (
    Operation("POST", "/v1/chat/completions", generate.chat_completions, "Answer a conversation", ChatBody,
              replies.ChatCompletion, streams=True, errors=_WORK, also=("/chat/completions",)),
    Operation("POST", "/v1/completions", generate.completions, "Continue a text", CompletionBody,
              replies.Completion, streams=True, errors=_WORK, also=("/completions",)),
    Operation("POST", "/v1/responses", generate.responses, "Answer, in the form of OpenAI's responses",
              ResponsesBody, replies.ResponseObject, streams=True, errors=_WORK, also=("/responses",)),
    Operation("POST", "/v1/messages", generate.messages, "Answer, in the form of Anthropic's messages",
              MessagesBody, replies.AnthropicMessage, streams=True, errors=_WORK),
    Operation("POST", "/v1/messages/count_tokens", generate.count_tokens, "Count a conversation's tokens", MessagesBody,
              replies.TokenCount, errors=_WORK),
    Operation("POST", "/v1/embeddings", probes.embeddings, "Not served", errors=(501,), also=("/embeddings",)),
    Operation("GET", "/v1/models", probes.models, "The model that is served", reply=replies.Models,
              also=("/models",)),
    Operation("GET", "/v1/models/{model}", probes.one_model, "One model", reply=replies.Model, errors=(404, 503)),
    Operation("POST", "/tokenize", text.tokenize, "Text to tokens", TokenizeBody, replies.Tokens,
              errors=(400, 408, 413, 503)),
    Operation("POST", "/detokenize", text.detokenize, "Tokens to text", DetokenizeBody, replies.Text,
              errors=(400, 408, 413, 503)),
    Operation("POST", "/apply-template", text.apply_template, "A conversation as the model's prompt", ChatBody,
              replies.RenderedPrompt, errors=(400, 408, 413, 503)),
    Operation("GET", "/props", probes.props, "What this server is", reply=replies.Props, errors=(503,)),
    Operation("GET", "/slots", probes.slots, "The request that runs and those that wait",
              reply=list[dict[str, Any]], errors=(503,)),
    Operation("GET", "/health", probes.health, "Whether requests are served", reply=replies.Status, open=True,
              errors=(503,), also=("/v1/health",)),
    Operation("GET", "/livez", probes.livez, "Whether the process lives", reply=replies.Status, open=True),
    Operation("GET", "/readyz", probes.readyz, "Whether the model is loaded and warm", reply=replies.Status,
              open=True, errors=(503,)),
    Operation("GET", "/metrics", probes.metrics, "Prometheus metrics", content="text/plain"),
    Operation("GET", "/expertd/status", watch.status, "Everything at a glance", reply=dict[str, Any]),
    Operation("GET", "/expertd/cache", watch.cache, "The expert cache", reply=dict[str, Any]),
    Operation("GET", "/expertd/heatmap", watch.heatmap, "How hot every expert is", reply=dict[str, Any]),
    Operation("GET", "/expertd/experts", series.experts, "Single experts, hottest first", reply=dict[str, Any],
              errors=(400,), query=(
                  Query("layer", "Of this layer alone"), Query("expert", "Of this index alone"),
                  Query("limit", f"At most so many; {series.FEW_EXPERTS} without it, {series.MOST_EXPERTS} at most"))),
    Operation("GET", "/expertd/series", series.series, "The last minutes in figures, and now",
              reply=dict[str, Any], errors=(400,),
              query=(Query("since", "The points after this number; all that are kept without it"),)),
    Operation("GET", "/expertd/events", watch.events, "Changes as they happen", content="text/event-stream",
              errors=(429,)),
    Operation("GET", "/expertd/profiles", profiles.listed, "The hot maps of the loaded model", reply=dict[str, Any],
              errors=(409, 503)),
    Operation("POST", "/expertd/profiles/merge", profiles.merge, "The sum of several profiles", MergeBody,
              dict[str, Any], admin=True, errors=_ACT),
    Operation("POST", "/expertd/profiles/save", profiles.save, "Write what is not on the disk yet",
              reply=dict[str, Any], admin=True, errors=(409, 503)),
    Operation("GET", "/expertd/profiles/{name}", profiles.one, "One hot map with its counts", reply=dict[str, Any],
              errors=(404, 409, 503)),
    Operation("PUT", "/expertd/profiles/{name}", profiles.put, "Add or replace one", Document, dict[str, Any],
              admin=True, errors=_ACT),
    Operation("DELETE", "/expertd/profiles/{name}", profiles.delete, "Delete one", reply=dict[str, Any],
              admin=True, errors=(404, 409, 503)),
    Operation("POST", "/expertd/profiles/{name}/rename", profiles.rename, "Rename one", RenameBody, dict[str, Any],
              admin=True, errors=_ACT),
    Operation("GET", "/expertd/warm", admin.warmed, "The last warm-up", reply=dict[str, Any], errors=(409, 503)),
    Operation("POST", "/expertd/warm", admin.warm, "Bring experts in, hottest first", WarmBody, dict[str, Any],
              streams=True, admin=True, errors=_ACT),
    Operation("POST", "/expertd/rehearse", admin.rehearse, "Run prompts, learn, warm, and run them again",
              RehearsalBody, dict[str, Any], streams=True, admin=True, errors=_ACT),
    Operation("POST", "/expertd/pin", admin.pin, "Lock experts in memory", SelectionBody, dict[str, Any],
              admin=True, errors=_ACT),
    Operation("POST", "/expertd/unpin", admin.unpin, "Give pins up; the experts stay", SelectionBody, dict[str, Any],
              admin=True, errors=_ACT),
    Operation("POST", "/expertd/evict", admin.evict, "Drop experts from memory", SelectionBody, dict[str, Any],
              admin=True, errors=_ACT),
    Operation("GET", "/expertd/trace", trace.status, "Whether routes are recorded", reply=dict[str, Any], admin=True,
              errors=(409, 503)),
    Operation("POST", "/expertd/trace/start", trace.start, "Record routes", TraceBody, dict[str, Any], admin=True,
              errors=_ACT),
    Operation("POST", "/expertd/trace/stop", trace.stop, "End recording", reply=dict[str, Any], admin=True,
              errors=(409, 503)),
    Operation("GET", "/expertd/trace/file", trace.file, "The recorded routes", content="application/octet-stream",
              admin=True, errors=(409, 503)),
    Operation("GET", "/", dashboard.index, "The dashboard", open=True, hidden=True),
    Operation("GET", "/static/{path:path}", dashboard.asset, "The dashboard's files", open=True, hidden=True),
)  # fmt: skip
