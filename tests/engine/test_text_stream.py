"""Text that can be shown: characters whole, stop strings unseen, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expertd.engine.text import TextStream

_CUTS = st.lists(st.integers(1, 7), max_size=40)


def _chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    chunks, at = [], 0
    for size in cuts:
        chunks.append(data[at : at + size])
        at += size
    return [*chunks, data[at:]]


def _stream(chunks: list[bytes], stops: tuple[str, ...]) -> tuple[str, str]:
    stream = TextStream(stops)
    text = "".join(stream.feed(chunk) for chunk in chunks)
    return text + stream.finish(), stream.stopped


@given(st.text(max_size=80), _CUTS)
def test_any_cut_gives_the_same_text(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "ignore")
    assert _stream(_chunks(data, cuts), ()) == (data.decode(), "")


@given(
    st.text(alphabet="ab🙂", max_size=60), st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3), _CUTS
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, stopped = _stream(_chunks(text.encode(), cuts), tuple(stops))
    found = [text.find(s) for s in stops if s in text]
    assert bool(stopped) == bool(found)
    if stopped:
        assert stopped in stops
        assert not any(s in shown for s in stops)
        assert text.startswith(shown + stopped)
    else:
        assert shown == text


@given(st.text(alphabet="ab🙂", max_size=40), _CUTS)
def test_nothing_is_taken_back(text: str, cuts: list[int]) -> None:
    """What was given before a stop string came is a prefix of the text before it."""
    stream, shown = TextStream(("aba",)), ""
    for chunk in _chunks(text.encode(), cuts):
        shown += stream.feed(chunk)
        assert text.split("aba")[0].startswith(shown)


def test_an_emoji_in_four_pieces_comes_whole() -> None:
    stream = TextStream()
    assert [stream.feed(bytes([b])) for b in "🙂".encode()] == ["", "", "", "🙂"]


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert _stream([b"ok", "🙂".encode()[:2]], ()) == ("ok", "")


def test_bytes_that_are_no_text_become_the_replacement_character() -> None:
    assert _stream([b"a\xff", b"b"], ()) == ("a\ufffdb", "")
