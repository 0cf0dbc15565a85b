"""The fields that say how tokens are drawn and when to stop: OpenAI's and llama-server's names in one struct.

Every field may be null, which means "not given".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from expertd.errors import RequestError
from expertd.runtime.requests import Sampling
from expertd.server.contract import Service

Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Scale = Annotated[float, Meta(ge=-1e6, le=1e6)]
BiasPair = tuple[int | str, float | bool]
_MAX_BIASES = 1024
_MAX_STOPS = 64
_SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau",
    "mirostat_eta",
)  # fmt: skip


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that all generating requests share."""

    temperature: Annotated[float, Meta(ge=-1, le=100)] | None = None
    top_k: Tokens | None = None
    top_p: Unit | None = None
    min_p: Unit | None = None
    typical_p: Unit | None = None
    top_n_sigma: Scale | None = None
    xtc_probability: Unit | None = None
    xtc_threshold: Unit | None = None
    dynatemp_range: Annotated[float, Meta(ge=0, le=100)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=100)] | None = None
    repeat_last_n: Tokens | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    dry_base: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    dry_allowed_length: Small | None = None
    dry_penalty_last_n: Tokens | None = None
    dry_sequence_breakers: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=1e3)] | None = None
    mirostat_eta: Annotated[float, Meta(ge=0, le=1e3)] | None = None
    logit_bias: dict[str, float | bool] | list[BiasPair] | None = None
    seed: int | None = None
    grammar: str | None = None
    stop: str | list[str] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n_predict: Tokens | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    expertd_profile: Annotated[str, Meta(max_length=128)] | None = None
    """The profile that this request teaches; the header X-Expertd-Profile says the same."""
    t_max_predict_ms: Annotated[float, Meta(ge=-1, le=1e12)] | None = None

    def token_limit(self, most: int | None) -> int | None:
        """The answer's limit in tokens; None is none. `most` is the server's own."""
        given = next((n for n in (self.max_completion_tokens, self.max_tokens, self.n_predict) if n is not None), -1)
        if given < 0:
            return most
        return given if most is None else min(given, most)

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError when there are too many."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > _MAX_STOPS:
            raise RequestError(f"at most {_MAX_STOPS} stop strings", param="stop")
        return tuple(s for s in given if s)

    def time_limit(self, most_seconds: float) -> float | None:
        """Seconds for the answer: the request's or the server's, whichever is shorter."""
        own = (self.t_max_predict_ms or 0) / 1000
        limits = [t for t in (own, most_seconds) if t > 0]
        return min(limits) if limits else None

    def sampling(self, service: Service, default: Sampling) -> Sampling:
        """The sampler chain. Raises RequestError for a bias on what is no token."""
        changed: dict[str, Any] = {name: v for name in _SAME if (v := getattr(self, name)) is not None}
        if changed.get("top_k", 0) < 0:
            changed["top_k"] = 0
        if self.dry_sequence_breakers is not None:
            changed["dry_sequence_breakers"] = tuple(b for b in self.dry_sequence_breakers if b)
        if self.logit_bias:
            changed["logit_bias"] = tuple(biases(self.logit_bias, service))
        if self.seed is not None:
            changed["seed"] = None if self.seed < 0 else self.seed & 0xFFFFFFFF
        if self.grammar:
            changed |= {"grammar": self.grammar, "grammar_triggers": ()}
        return replace(default, **changed) if changed else default


def biases(given: dict[str, float | bool] | list[BiasPair], service: Service) -> list[tuple[int, float]]:
    """(token, bias) pairs. Text is biased token by token, `false` forbids. Raises RequestError."""
    model = service.model
    n_vocab = model.n_vocab if model else 0
    pairs = list(given.items()) if isinstance(given, dict) else given
    if len(pairs) > _MAX_BIASES:
        raise RequestError(f"at most {_MAX_BIASES} biases", param="logit_bias")
    out: list[tuple[int, float]] = []
    for key, value in pairs:
        bias = float("-inf") if value is False else float(value)
        token = int(key) if isinstance(key, int) or (isinstance(given, dict) and _is_number(key)) else None
        if token is None:
            tokens = service.tokenize(str(key), add_special=False, parse_special=True)
            out += [(t, bias) for t in tokens]
        elif 0 <= token < n_vocab:
            out.append((token, bias))
        else:
            raise RequestError(f"{token} is no token of this model (0 to {n_vocab - 1})", param="logit_bias")
    return out


def _is_number(text: str) -> bool:
    return len(text) <= 12 and text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal()
