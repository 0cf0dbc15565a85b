"""Bodies of the endpoints about tokens and of the admin verbs."""

from __future__ import annotations

import msgspec


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`, as llama-server has it."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    tokens: list[int]
