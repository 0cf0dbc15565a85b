"""What a caller asks of the model and what it gets back, as data.

The server turns HTTP into a `GenerationRequest` and the events into JSON; the engine thread runs the request and posts
the events. Parsing of tools and reasoning out of the text is the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler chain, in llama.cpp's own words and defaults (common_params_sampling). Temperature 0 or below is
    greedy. `seed` None draws one."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    grammar: str = ""
    """GBNF; empty is none."""
    grammar_triggers: tuple[str, ...] = ()
    """Patterns that start a lazy grammar (tool calls); empty means the grammar holds from the first token."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion. `prompt` is token ids; `max_tokens` None is no limit but the context's."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: none; 0: of the chosen token alone; n: and of the n likeliest."""
    ignore_eos: bool = False
    render_special: bool = False
    """Whether control tokens appear in the text (harmony and think parsers need them)."""
    cache_prompt: bool = True
    profile: str | None = None
    """The profile that this request teaches, where not the default."""
    time_limit_seconds: float | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the bytes it stands for and the natural logarithm of its probability; `top` holds the likeliest."""

    token: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `position` 0 is the next one to run."""

    position: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Prompt tokens computed so far, of which `cached` came from an earlier request."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can be shown: whole UTF-8 characters, no part of a stop string. May be empty where a token's text is
    held back; `tokens` then still counts."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the request cost in experts and disk; the response's root `expertd` object. `io_wait_ms` is the time in
    which the engine's thread stood still, None where the kernel does not account for that."""

    expert_requests: int = 0
    expert_hits: int = 0
    bytes_read: int = 0
    io_wait_ms: float | None = None
    major_faults: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """llama-server's `timings` object. Tokens and milliseconds; `cache_n` prompt tokens were reused."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_n * 1000 / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n * 1000 / self.predicted_ms if self.predicted_ms else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason`: stop (end token or stop string), length, or time. `stop_text` is the stop string met.
    `queue_ms` was spent waiting, `first_token_ms` from the start of the work to the first token."""

    reason: str
    stop_text: str
    prompt_tokens: int
    timings: Timings
    receipt: Receipt
    queue_ms: float = 0.0
    first_token_ms: float = 0.0


Event = Queued | PromptProgress | Piece | Finished
