"""Tokens and templates: what a client needs to count and to see its prompt."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from expertd.errors import RequestError
from expertd.server.bodies.decode import read
from expertd.server.bodies.openai import ChatBody
from expertd.server.bodies.text import DetokenizeBody, TokenizeBody
from expertd.server.chat import Conversation, loaded, render, spoken_by
from expertd.server.context import context_of
from expertd.server.contract import Service
from expertd.server.convert.chat import messages_of, template_extra, tools_of
from expertd.server.wire import JsonResponse


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, TokenizeBody)
    loaded(context.service)
    return JsonResponse({"tokens": await context.in_thread(_tokens, context.service, body)})


def _tokens(service: Service, body: TokenizeBody) -> list[Any]:
    tokens = service.tokenize(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return list(tokens)
    return [{"id": t, "piece": _piece(service.piece(t))} for t in tokens]


def _piece(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token holds part of a character alone."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, DetokenizeBody)
    n_vocab = loaded(context.service).n_vocab
    wrong = next((t for t in body.tokens if not 0 <= t < n_vocab), None)
    if wrong is not None:
        raise RequestError(f"{wrong} is no token of this model (0 to {n_vocab - 1})", param="tokens")
    text = await context.in_thread(context.service.detokenize, body.tokens, special=True)
    return JsonResponse({"content": text.decode("utf-8", "replace")})


async def apply_template(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, ChatBody)
    model = loaded(context.service)
    conversation = Conversation(
        messages=messages_of(body.messages),
        tools=tools_of(body.tools),
        template_extra=template_extra(body),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    spoken = spoken_by(model.chat_template)
    return JsonResponse({"prompt": await context.in_thread(render, context.service, conversation, spoken)})
