"""From token bytes to text that can be shown: whole characters only, nothing of a stop string.

Pure: no llama.cpp. The server's parsing of tools and reasoning works on what comes out here.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feeds on token bytes, gives text. A character that is not complete and a suffix that may begin a stop string are
    held back."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped = ""
        """The stop string that was met; the stream gives nothing more after it."""

    def feed(self, piece: bytes) -> str:
        """Text that became certain with this piece."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        self._held = ""
        if not self._stops or not text:
            return text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda f: (f[0], -len(f[1])))
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text

    def finish(self) -> str:
        """What was held back for a stop string that did not come. An incomplete character at the end is dropped."""
        text, self._held = self._held, ""
        return "" if self.stopped else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
