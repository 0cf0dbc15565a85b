"""The endpoints that generate: chat completions, completions, responses and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from expertd.errors import RequestError
from expertd.runtime.requests import GenerationRequest, Sampling
from expertd.server.bodies.anthropic import MessagesBody
from expertd.server.bodies.decode import read
from expertd.server.bodies.openai import ChatBody, CompletionBody
from expertd.server.bodies.responses import ResponsesBody
from expertd.server.bodies.sampling import SamplingFields
from expertd.server.chat import Conversation, Prompt, loaded, prepare, tokens_of
from expertd.server.context import Context, context_of, record_of
from expertd.server.contract import ModelInfo
from expertd.server.convert import chat as from_chat
from expertd.server.convert import messages as from_messages
from expertd.server.convert import responses as from_responses
from expertd.server.generation import GenerationResponse, Job, Renderer
from expertd.server.grammar.schema import schema_grammar
from expertd.server.output.deltas import Plain
from expertd.server.render.chat import ChatRenderer
from expertd.server.render.completion import CompletionRenderer
from expertd.server.render.messages import MessagesRenderer
from expertd.server.render.responses import ResponsesRenderer
from expertd.server.wire import JsonResponse


async def chat_completions(request: Request) -> ASGIApp:
    context = context_of(request)
    body = await read(request, ChatBody)
    model = loaded(context.service)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = await _prompt(context, body, from_chat.conversation_of(body))
    renderer = ChatRenderer(
        model.id,
        fingerprint_of(model),
        stream=bool(body.stream),
        usage=body.wants_usage,
        logprobs=logprobs is not None,
        progress=bool(body.return_progress),
    )
    return _run(request, body, prompt, renderer, stream=bool(body.stream), logprobs=logprobs)


async def completions(request: Request) -> ASGIApp:
    context = context_of(request)
    body = await read(request, CompletionBody)
    model = loaded(context.service)
    from_chat.one_answer(body)
    _refuse_unsupported(body)
    logprobs = _legacy_logprobs(body)
    prompt = await context.in_thread(_plain_prompt, context, model, body)
    renderer = CompletionRenderer(
        model.id,
        fingerprint_of(model),
        stream=bool(body.stream),
        usage=body.wants_usage,
        logprobs=logprobs is not None,
        progress=bool(body.return_progress),
        echo=prompt.text if body.echo else "",
    )
    return _run(request, body, prompt, renderer, stream=bool(body.stream), logprobs=logprobs)


async def responses(request: Request) -> ASGIApp:
    context = context_of(request)
    body = await read(request, ResponsesBody)
    model = loaded(context.service)
    prompt = await _prompt(context, body, from_responses.conversation_of(body))
    renderer = ResponsesRenderer(model.id, _echoed(body), stream=bool(body.stream))
    if body.max_output_tokens is not None:
        body.max_tokens = body.max_output_tokens
    return _run(request, body, prompt, renderer, stream=bool(body.stream), logprobs=None)


async def messages(request: Request) -> ASGIApp:
    context = context_of(request)
    body = await read(request, MessagesBody)
    model = loaded(context.service)
    prompt = await _prompt(context, body, from_messages.conversation_of(body))
    if body.stop_sequences:
        body.stop = body.stop_sequences
    renderer = MessagesRenderer(model.id, record_of(request).request_id, len(prompt.tokens), stream=bool(body.stream))
    return _run(request, body, prompt, renderer, stream=bool(body.stream), logprobs=None)


async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await read(request, MessagesBody)
    conversation = replace(from_messages.conversation_of(body), choice="auto")
    prompt = await context.in_thread(prepare, context.service, conversation, Sampling())
    return JsonResponse({"input_tokens": len(prompt.tokens)})


def fingerprint_of(model: ModelInfo) -> str:
    return f"fp_{model.fingerprint[:12]}"


async def _prompt(context: Context, body: SamplingFields, conversation: Conversation) -> Prompt:
    return await context.in_thread(_prompt_in_thread, context, body, conversation)


def _prompt_in_thread(context: Context, body: SamplingFields, conversation: Conversation) -> Prompt:
    sampling = body.sampling(context.service, context.settings.sampling)
    return prepare(context.service, conversation, sampling)


def _plain_prompt(context: Context, model: ModelInfo, body: CompletionBody) -> Prompt:
    """A prompt as it was sent: text or tokens. Raises RequestError for several and for tokens that are none."""
    sampling = body.sampling(context.service, context.settings.sampling)
    schema, param = from_chat.wanted_schema(body)
    if schema is not None:
        sampling = replace(sampling, grammar=schema_grammar(schema, param), grammar_triggers=())
    given: str | Sequence[str | int | list[int]] = body.prompt
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    if isinstance(given, str):
        return Prompt(given, tuple(tokens_of(context.service, model, given)), sampling, False, Plain())
    tokens = [t for t in given if isinstance(t, int)]
    if len(tokens) != len(given):
        raise RequestError("one prompt a request: text or a list of tokens", param="prompt")
    wrong = next((t for t in tokens if not 0 <= t < model.n_vocab), None)
    if wrong is not None:
        raise RequestError(f"{wrong} is no token of this model (0 to {model.n_vocab - 1})", param="prompt")
    text = context.service.detokenize(tokens).decode("utf-8", "replace") if body.echo else ""
    return Prompt(text, tuple(tokens), sampling, False, Plain())


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of > 1:
        raise RequestError("best_of must be 1", param="best_of")
    if body.suffix:
        raise RequestError("text cannot be filled in before a suffix", param="suffix")
    if body.echo and body.logprobs:
        raise RequestError("log probabilities of the prompt are not computed", param="echo")


def _legacy_logprobs(body: CompletionBody) -> int | None:
    given = body.logprobs if body.logprobs is not None else body.n_probs or None
    if isinstance(given, bool):
        return 0 if given else None
    return given


def _echoed(body: ResponsesBody) -> dict[str, object]:
    """Fields of a response that come back as they were sent."""
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": body.tool_choice or "auto",
        "tools": [t for t in body.tools or () if t.type == "function"],
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "truncation": "disabled",
    }


def _run(
    request: Request, body: SamplingFields, prompt: Prompt, renderer: Renderer, *, stream: bool, logprobs: int | None
) -> ASGIApp:
    context, record = context_of(request), record_of(request)
    settings = context.settings
    work = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=body.token_limit(settings.max_tokens),
        sampling=prompt.sampling,
        stop=body.stops(),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        render_special=prompt.special,
        cache_prompt=body.cache_prompt is not False,
        profile=body.expertd_profile or request.headers.get("x-expertd-profile") or None,
        time_limit_seconds=body.time_limit(settings.request_seconds),
        request_id=record.request_id,
    )
    return GenerationResponse(
        Job(
            service=context.service,
            request=work,
            parser=prompt.parser,
            renderer=renderer,
            stream=stream,
            record=record,
            keepalive_seconds=settings.keepalive_seconds,
            stall_seconds=settings.stall_seconds,
        )
    )
