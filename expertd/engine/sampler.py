"""From logits to a token: llama.cpp's sampler chain in its default order, with a grammar beside it.

Order (common/sampling.cpp): logit bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature,
then the draw. A grammar is checked after the draw and only when it refuses the token is the whole vocabulary filtered,
as there: filtering 150k tokens at every step costs milliseconds.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as L

from expertd.engine.context import Context
from expertd.engine.requests import Sampling
from expertd.errors import RequestError

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_ARRAY_P = ctypes.POINTER(L.llama_token_data_array)
_MIN_KEEP = 0


class Sampler:
    """One request's chain. `close` frees it. Raises RequestError for a grammar that does not parse."""

    def __init__(self, context: Context, settings: Sampling) -> None:
        self._context = context
        self._vocab, self._n_vocab = context.model.vocab, context.model.n_vocab
        self.seed = settings.seed if settings.seed is not None and settings.seed >= 0 else secrets.randbits(31)
        self._keep: list[Any] = []
        self._grammar = self._make_grammar(settings)
        self._chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
        for link in self._links(settings):
            L.llama_sampler_chain_add(self._chain, link)
        self._candidates: Any = None

    def close(self) -> None:
        if self._chain:
            L.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar:
            L.llama_sampler_free(self._grammar)
            self._grammar = None

    def accept_prompt(self, tokens: list[int]) -> None:
        """Lets the penalties see the prompt's tokens; the grammar does not."""
        for token in tokens:
            L.llama_sampler_accept(self._chain, token)

    def sample(self) -> int:
        """Draws from the context's last logits, and accepts the token."""
        if self._grammar is None:
            token: int = L.llama_sampler_sample(self._chain, self._context.handle, -1)
            return token
        token = self._draw(grammar_first=False)
        if not self._allowed(token):
            token = self._draw(grammar_first=True)
        L.llama_sampler_accept(self._grammar, token)
        L.llama_sampler_accept(self._chain, token)
        return token

    def _draw(self, *, grammar_first: bool) -> int:
        if self._candidates is None:
            self._candidates = np.zeros(self._n_vocab, _TOKEN_DATA)
        data = self._candidates
        data["id"] = np.arange(self._n_vocab, dtype=np.int32)
        data["logit"] = self._context.logits()
        data["p"] = 0.0
        array = self._token_array(data)
        if grammar_first:
            L.llama_sampler_apply(self._grammar, ctypes.byref(array))
        L.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def _allowed(self, token: int) -> bool:
        one = np.array([(token, 1.0, 0.0)], _TOKEN_DATA)
        array = self._token_array(one)
        L.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(one["logit"][0] != -np.inf)

    @staticmethod
    def _token_array(data: Any) -> Any:
        pointer = data.ctypes.data_as(ctypes.POINTER(L.llama_token_data))
        return L.llama_token_data_array(data=pointer, size=len(data), selected=-1, sorted=False)

    def _make_grammar(self, s: Sampling) -> Any:
        if not s.grammar:
            return None
        text, root = s.grammar.encode(), b"root"
        if s.grammar_triggers:
            patterns = (ctypes.c_char_p * len(s.grammar_triggers))(*(p.encode() for p in s.grammar_triggers))
            self._keep.append(patterns)
            grammar = L.llama_sampler_init_grammar_lazy_patterns(
                self._vocab, text, root, patterns, len(s.grammar_triggers), None, 0
            )
        else:
            grammar = L.llama_sampler_init_grammar(self._vocab, text, root)
        if not grammar:
            raise RequestError("the grammar does not parse", param="grammar", hint="see llama.cpp's GBNF guide")
        return grammar

    def _links(self, s: Sampling) -> list[Any]:
        links = []
        if s.logit_bias:
            biases = (L.llama_logit_bias * len(s.logit_bias))(*s.logit_bias)
            links.append(L.llama_sampler_init_logit_bias(self._n_vocab, len(s.logit_bias), biases))
        if s.repeat_penalty != 1.0 or s.frequency_penalty or s.presence_penalty:
            last_n = s.repeat_last_n if s.repeat_last_n >= 0 else self._context.n_ctx
            links.append(
                L.llama_sampler_init_penalties(
                    self._n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
                )
            )
        if s.dry_multiplier:
            links.append(self._dry(s))
        if s.temperature <= 0:
            return [*links, L.llama_sampler_init_greedy()]
        return links + self._random_links(s)

    def _random_links(self, s: Sampling) -> list[Any]:
        if s.mirostat == 1:
            draw = L.llama_sampler_init_mirostat(self._n_vocab, self.seed, s.mirostat_tau, s.mirostat_eta, 100)
            return [L.llama_sampler_init_temp(s.temperature), draw]
        if s.mirostat == 2:
            draw = L.llama_sampler_init_mirostat_v2(self.seed, s.mirostat_tau, s.mirostat_eta)
            return [L.llama_sampler_init_temp(s.temperature), draw]
        links = []
        if s.top_n_sigma >= 0:
            links.append(L.llama_sampler_init_top_n_sigma(s.top_n_sigma))
        if s.top_k > 0:
            links.append(L.llama_sampler_init_top_k(s.top_k))
        if s.typical_p < 1.0:
            links.append(L.llama_sampler_init_typical(s.typical_p, _MIN_KEEP))
        if s.top_p < 1.0:
            links.append(L.llama_sampler_init_top_p(s.top_p, _MIN_KEEP))
        if s.min_p > 0.0:
            links.append(L.llama_sampler_init_min_p(s.min_p, _MIN_KEEP))
        if s.xtc_probability > 0.0:
            links.append(L.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, _MIN_KEEP, self.seed))
        links.append(L.llama_sampler_init_temp_ext(s.temperature, s.dynatemp_range, s.dynatemp_exponent))
        links.append(L.llama_sampler_init_dist(self.seed))
        return links

    def _dry(self, s: Sampling) -> Any:
        breakers = (ctypes.c_char_p * len(s.dry_sequence_breakers))(*(b.encode() for b in s.dry_sequence_breakers))
        self._keep.append(breakers)
        last_n = s.dry_penalty_last_n if s.dry_penalty_last_n >= 0 else self._context.n_ctx
        return L.llama_sampler_init_dry(
            self._vocab, s.dry_multiplier, s.dry_base, s.dry_allowed_length, last_n, breakers,
            len(s.dry_sequence_breakers),
        )  # fmt: skip


def top_logprobs(logits: Any, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
    """The natural log probability of `token` before any sampler, and the `n` likeliest as (token, log probability)."""
    shifted = logits - logits.max()
    log_total = float(np.log(np.exp(shifted, dtype=np.float64).sum()))
    best: list[tuple[int, float]] = []
    if n > 0:
        n = min(n, len(logits))
        top = np.argpartition(shifted, -n)[-n:]
        top = top[np.argsort(-shifted[top], kind="stable")]
        best = [(int(i), float(shifted[i]) - log_total) for i in top]
    return float(shifted[token]) - log_total, best
