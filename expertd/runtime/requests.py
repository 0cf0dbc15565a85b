"""The words of a request and its events, where the floors above look for them; `engine.requests` defines them."""

from expertd.engine.requests import (
    Event,
    Finished,
    GenerationRequest,
    Piece,
    PromptProgress,
    Queued,
    Receipt,
    Sampling,
    Timings,
    TokenLogprob,
)

__all__ = [
    "Event",
    "Finished",
    "GenerationRequest",
    "Piece",
    "PromptProgress",
    "Queued",
    "Receipt",
    "Sampling",
    "Timings",
    "TokenLogprob",
]
