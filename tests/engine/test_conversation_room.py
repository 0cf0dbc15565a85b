"""Saved conversations within their bound: what is about to be restored is not dropped to make room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from expertd.engine.conversations import Conversations


class Context:
    """A context whose state is one byte a token."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(recurrent=False)
        self.conversations: Conversations | None = None

    def state_nbytes(self) -> int:
        assert self.conversations is not None
        return len(self.conversations.tokens)

    def save(self) -> bytes:
        return bytes(self.state_nbytes())

    def restore(self, state: bytes) -> bool:
        return True

    def keep(self, n: int) -> int:
        return n


def conversations(limit: int) -> Conversations:
    context: Any = Context()
    context.conversations = made = Conversations(context, limit)
    return made


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(17, 60)), max_size=30), st.integers(0, 100))
def test_any_order_of_conversations_stays_within_the_bound(turns: list[tuple[int, int]], limit: int) -> None:
    kept = conversations(limit)
    for speaker, length in turns:
        prompt = [speaker * 1000 + i for i in range(length)]
        n = kept.take(prompt, reuse=True)
        assert kept.tokens == prompt[:n]
        kept.extend(prompt[n:])
        assert 0 <= kept.nbytes <= limit
        assert len(kept.tokens) == length


def test_the_one_to_restore_survives_making_room() -> None:
    kept = conversations(100)
    for first, length in ((0, 40), (1000, 60), (2000, 50), (1000, 61)):
        prompt = list(range(first, first + length))
        n = kept.take(prompt, reuse=True)
        kept.extend(prompt[n:])
    assert kept.counters.restored == 1
