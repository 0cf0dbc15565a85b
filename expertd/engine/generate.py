"""One request from prompt to last token, as a generator of events; every step can be cancelled from another thread.

1. Take over what the context or a saved conversation already holds of the prompt.
2. Decode the rest in batches; report progress after each.
3. Sample a token; an end token ends it.
4. Give its text, less what may still become a stop string.
5. End at a stop string, the token limit, the time limit or the context's end; else decode the token and go to 3.

The time limit also ends 2, and any decode half way.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace

from expertd.engine.context import Cancelled, Context
from expertd.engine.conversations import Conversations
from expertd.engine.deadline import Deadline
from expertd.engine.requests import GenerationRequest, Piece, PromptProgress, Sampling, Timings, TokenLogprob
from expertd.engine.sampler import Sampler, top_logprobs
from expertd.engine.text import TextStream
from expertd.errors import ContextFullError, RequestError
from expertd.types import Phase


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended. `reason` is stop, length or time; `first_token_ms` counts from the start of the work, 0
    where there was no token."""

    reason: str
    stop_text: str
    timings: Timings
    first_token_ms: float


def check_fits(request: GenerationRequest, n_ctx: int) -> None:
    """Raises ContextFullError when the prompt leaves no room for one token, RequestError when it is empty."""
    if not request.prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if len(request.prompt) >= n_ctx:
        raise ContextFullError(len(request.prompt), n_ctx)


class Generation:
    """Runs requests on one context, in the thread that owns it."""

    def __init__(self, context: Context, conversations: Conversations) -> None:
        self._context, self._conversations = context, conversations

    def run(self, request: GenerationRequest) -> Generator[PromptProgress | Piece, None, Outcome]:
        """Yields progress and text; returns the outcome. Raises what `check_fits`, the sampler and the decode raise."""
        check_fits(request, self._context.n_ctx)
        sampler = Sampler(self._context, self._sampling(request))
        deadline = Deadline(request.time_limit_seconds, self._context.cancel)
        try:
            with deadline:
                return (yield from self._run(request, sampler, deadline))
        except Exception:
            # Whatever it was, memory that ran out included: the next request must not find half a step in the context.
            self._conversations.undo()
            raise
        finally:
            if deadline.fired:
                self._context.clear_cancel()
            sampler.close()

    def _sampling(self, request: GenerationRequest) -> Sampling:
        if not request.ignore_eos:
            return request.sampling
        never = tuple((token, float("-inf")) for token in self._context.model.end_tokens)
        return replace(request.sampling, logit_bias=request.sampling.logit_bias + never)

    def _run(
        self, request: GenerationRequest, sampler: Sampler, deadline: Deadline
    ) -> Generator[PromptProgress | Piece, None, Outcome]:
        began = time.perf_counter()
        cached, done = yield from self._prefill(request, deadline)
        if _uses_history(request.sampling):
            sampler.accept_prompt(list(request.prompt))
        prompt_done = time.perf_counter()
        stream = TextStream(request.stop)
        limit = request.max_tokens if request.max_tokens is not None else self._context.n_ctx
        n, first_token, reason = 0, 0.0, "" if limit > 0 else "length"
        if done < len(request.prompt):
            reason = "time"
        while not reason:
            token = sampler.sample()
            first_token = first_token or time.perf_counter()
            if self._context.model.is_end(token):
                reason = "stop"
                break
            n += 1
            yield self._piece(token, stream, request)
            if stream.stopped:
                reason = "stop"
            elif n >= limit or len(self._conversations.tokens) >= self._context.n_ctx:
                reason = "length"
            elif deadline.passed or not self._decode([token], Phase.DECODE, deadline, logits=True):
                reason = "time"
        rest = stream.finish()
        if rest:
            yield Piece(rest, ())
        timings = Timings(
            cache_n=cached,
            prompt_n=done - cached,
            prompt_ms=(prompt_done - began) * 1000,
            predicted_n=n,
            predicted_ms=(time.perf_counter() - prompt_done) * 1000,
        )
        return Outcome(reason, stream.stopped, timings, (first_token - began) * 1000 if first_token else 0.0)

    def _prefill(
        self, request: GenerationRequest, deadline: Deadline
    ) -> Generator[PromptProgress, None, tuple[int, int]]:
        """Returns how many tokens of the prompt were reused, and how many are in the context: all, or as many as the
        time allowed."""
        prompt, total = request.prompt, len(request.prompt)
        cached = done = self._conversations.take(prompt, reuse=request.cache_prompt)
        yield PromptProgress(done, total, cached)
        while done < total:
            chunk = prompt[done : done + self._context.n_batch]
            if deadline.passed or not self._decode(chunk, Phase.PREFILL, deadline, logits=done + len(chunk) == total):
                break
            done += len(chunk)
            yield PromptProgress(done, total, cached)
        return cached, done

    def _decode(self, tokens: tuple[int, ...] | list[int], phase: Phase, deadline: Deadline, *, logits: bool) -> bool:
        """False, with nothing of it kept, where the deadline came half way."""
        try:
            self._context.decode(tokens, len(self._conversations.tokens), phase, logits=logits)
        except Cancelled:
            if not deadline.fired:
                raise
            self._conversations.undo()
            return False
        self._conversations.extend(tokens)
        return True

    def _piece(self, token: int, stream: TextStream, request: GenerationRequest) -> Piece:
        model = self._context.model
        text = stream.feed(model.piece(token, special=request.render_special))
        if request.logprobs is None:
            return Piece(text, (token,))
        logprob, best = top_logprobs(self._context.logits(), token, request.logprobs)
        top = tuple(TokenLogprob(t, model.piece(t, special=True), p) for t, p in best)
        return Piece(text, (token,), (TokenLogprob(token, model.piece(token, special=True), logprob, top),))


def _uses_history(sampling: Sampling) -> bool:
    return bool(
        sampling.repeat_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.dry_multiplier
    )
