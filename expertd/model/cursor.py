"""A window that moves over a file whose every length may be a lie.

Each step is checked against the file's length before a byte is read, so a damaged header costs one window of memory and
gives one line of text. Not here: what the bytes mean (`header`).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from expertd.errors import ModelFormatError

WINDOW_NBYTES = 1 << 20
MAX_STRINGS = 1 << 22
"""Strings of all arrays together: the largest vocabularies with their merges are near a million."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
RELOAD = "download it again: it is damaged or was cut short"


class Cursor:
    """A window that moves over a file. Positions are absolute; each step is checked against the file's length."""

    __slots__ = ("base", "buf", "file", "path", "pos", "size", "strings")

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path = file, size, path
        self.base = self.pos = self.strings = 0
        self.buf = b""

    @property
    def here(self) -> int:
        return self.base + self.pos

    def fail(self, what: str, hint: str = RELOAD) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {what}", hint=hint)

    def need(self, n: int, what: str) -> None:
        """Bring the next `n` bytes into the window."""
        if self.pos + n <= len(self.buf):
            return
        missing = self.here + n - self.size
        if missing > 0:
            raise self.fail(f"ends in {what} at byte {self.here} of {self.size}: short by {missing} bytes")
        self.base, self.pos = self.here, 0
        self.file.seek(self.base)
        self.buf = self.file.read(max(n, WINDOW_NBYTES))
        if len(self.buf) < n:
            raise self.fail(f"ends in {what} at byte {self.base + len(self.buf)}: it was cut while being read")

    def skip(self, n: int, what: str) -> None:
        missing = self.here + n - self.size
        if missing > 0:
            raise self.fail(f"{what} at byte {self.here} claims {n} bytes: short by {missing} bytes")
        self.pos += n
        if self.pos > len(self.buf):
            self.base, self.pos, self.buf = self.here, 0, b""

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.pos += 4
        return int(_U32.unpack_from(self.buf, self.pos - 4)[0])

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.pos += 8
        return int(_U64.unpack_from(self.buf, self.pos - 8)[0])

    def raw(self, n: int, what: str) -> bytes:
        self.need(n, what)
        self.pos += n
        return self.buf[self.pos - n : self.pos]

    def text(self, limit: int, what: str) -> str:
        n = self.u64(what)
        if n > self.size - self.here:
            self.skip(n, what)
        if n > limit:
            raise self.fail(f"{what} at byte {self.here - 8} claims {n} bytes, more than {limit}")
        return self.raw(n, what).decode("utf-8", "replace")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings. The one loop of this module that a large vocabulary pays for."""
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.fail(f"{what} claims {count} strings, more than any vocabulary has")
        unpack = _U64.unpack_from
        while count:
            self.need(8, what)
            buf, pos, last, length = self.buf, self.pos, len(self.buf) - 8, 0
            while count and pos <= last:
                length = unpack(buf, pos)[0]
                pos += 8 + length
                count -= 1
            self.pos = pos - length
            self.skip(length, f"a string of {what}")


def quote(name: str) -> str:
    """A name from a file, safe in one line of a message: escaped and at most 80 characters."""
    text = ascii(name)
    return text if len(text) <= 80 else text[:76] + "..." + text[0]
