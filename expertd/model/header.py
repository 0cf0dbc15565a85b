"""Reads the header of one GGUF file: versions 2 and 3, little-endian. Nothing is believed before it is checked.

Covers: key-values, tensor entries, their absolute offsets and sizes, and every way in which a file can be damaged; each
gives a ModelFormatError of one line that names the file and says what is wrong and where. Arrays of the tokenizer are
stepped over, not read: a header of 20 MB takes a tenth of a second and one window of memory.
Not here: split files (`gguf`), what the tensors mean (`expertmap`), writing (the gguf package).

Layout of a file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic "GGUF", u32 version, u64 tensors,
u64 keys; per key a string, u32 type and value; per tensor a string, u32 dimensions, u64 each, u32 type, u64 offset;
then padding up to `general.alignment`, where the data starts. A string is a u64 length and its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertd.model.cursor import Cursor, quote
from expertd.model.tensors import Entry, TensorInfo, place

Scalar = int | float | bool | str

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_NBYTES = 1 << 12
MAX_KEPT_STRING_NBYTES = 1 << 20
MAX_KEPT_ITEMS = 1 << 12
"""Longer numeric arrays are no per-layer setting: only their length is kept."""
MAX_NBYTES = 1 << 62

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_NBYTES = {t: struct.calcsize("<" + c) for t, c in _SCALARS.items()}
_TYPE_STRING, _TYPE_ARRAY = 8, 9
_MIN_KEY_NBYTES, _MIN_TENSOR_NBYTES = 14, 24


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array, or a very long string, that was stepped over: its element type and length."""

    type: str
    length: int


KvValue = Scalar | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says. `data_offset` is where tensor data starts; `tensors` are in the file's order."""

    path: Path
    nbytes: int
    version: int
    alignment: int
    data_offset: int
    kv: dict[str, KvValue]
    tensors: tuple[TensorInfo, ...]
    warnings: tuple[str, ...]


def read_header(file: BinaryIO, nbytes: int, path: Path, number: int = 0) -> Header:
    """Parse a seekable binary file of `nbytes` bytes; `path` is for messages, `number` becomes the tensors' file.

    Raises ModelFormatError. Reads no tensor data.
    """
    at = Cursor(file, nbytes, path)
    version, n_tensors, n_keys = _preamble(at)
    kv = _read_kv(at, n_keys)
    alignment = _alignment(at, kv)
    entries = _read_entries(at, n_tensors)
    data_offset = -(-at.here // alignment) * alignment
    tensors, warnings = place(at, entries, data_offset, alignment, number)
    return Header(path, nbytes, version, alignment, data_offset, kv, tensors, tuple(warnings))


def _preamble(at: Cursor) -> tuple[int, int, int]:
    if at.size == 0:
        raise at.fail("is empty: short by at least 24 bytes")
    magic = at.raw(min(4, at.size), "the magic number")
    if magic != b"GGUF"[: len(magic)]:
        kind = {b"ggml": "a GGML file of 2023", b"ggjt": "a GGML file of 2023", b"PK\x03\x04": "a zip or PyTorch file"}
        what = kind.get(magic, "a Git LFS pointer" if magic == b"vers" else f"no GGUF: starts with {magic!r}")
        raise at.fail(f"is {what}", "a model file in GGUF form is wanted")
    if len(magic) < 4:
        raise at.fail(f"ends in the magic number at byte {at.size} of {at.size}: short by {4 - at.size} bytes")
    version = at.u32("the version")
    if version and version & 0xFFFF == 0:
        raise at.fail(f"is big-endian (version reads {version:#x})", "convert it on a little-endian machine")
    if version not in (2, 3):
        hint = "convert the model again with a current llama.cpp" if version == 1 else "a newer expertd may read it"
        raise at.fail(f"is GGUF version {version}; versions 2 and 3 can be read", hint)
    n_tensors, n_keys = at.u64("the tensor count"), at.u64("the key count")
    for n, least, most, what in (
        (n_tensors, _MIN_TENSOR_NBYTES, MAX_TENSORS, "tensors"),
        (n_keys, _MIN_KEY_NBYTES, MAX_KEYS, "keys"),
    ):
        room = (at.size - at.here) // least
        if n > room:
            raise at.fail(
                f"claims {n} {what}, but its {at.size} bytes have room for {room}: short by at least "
                f"{n * least - (at.size - at.here)} bytes"
            )
        if n > most:
            raise at.fail(f"claims {n} {what}, more than {most}")
    return version, n_tensors, n_keys


def _read_kv(at: Cursor, n_keys: int) -> dict[str, KvValue]:
    kv: dict[str, KvValue] = {}
    for i in range(n_keys):
        start = at.here
        key = at.text(MAX_NAME_NBYTES, f"the name of key {i + 1} of {n_keys}")
        if not key:
            raise at.fail(f"key {i + 1} of {n_keys} at byte {start} has no name")
        what = f"key {quote(key)}"
        if key in kv:
            raise at.fail(f"{what} is there twice, again at byte {start}")
        kv[key] = _read_value(at, key, at.u32(what), what)
    return kv


def _read_value(at: Cursor, key: str, type_id: int, what: str) -> KvValue:
    if type_id == _TYPE_STRING:
        return _read_string(at, what)
    if type_id == _TYPE_ARRAY:
        return _read_array(at, key, what)
    code = _SCALARS.get(type_id)
    if code is None:
        raise at.fail(f"{what} at byte {at.here - 4} has value type {type_id}, which GGUF does not know")
    value: Scalar = struct.unpack("<" + code, at.raw(_SCALAR_NBYTES[type_id], what))[0]
    return value


def _read_string(at: Cursor, what: str) -> str | SkippedArray:
    n = at.u64(what)
    if n > MAX_KEPT_STRING_NBYTES or n > at.size - at.here:
        at.skip(n, what)
        return SkippedArray("string", n)
    return at.raw(n, what).decode("utf-8", "replace")


def _read_array(at: Cursor, key: str, what: str) -> KvValue:
    """Short arrays of settings are kept; the tokenizer's and long ones become their length."""
    item, start = at.u32(what), at.here
    n = at.u64(what)
    if item != _TYPE_STRING and item not in _SCALARS:
        nested = "an array of arrays, which llama.cpp does not read" if item == _TYPE_ARRAY else f"items of type {item}"
        raise at.fail(f"{what} at byte {start - 4} has {nested}")
    least = n * _SCALAR_NBYTES.get(item, 8)
    if least > at.size - at.here:
        at.skip(least, f"{what}: an array of {n} items")
    keep = n <= MAX_KEPT_ITEMS and not key.startswith("tokenizer.")
    if item == _TYPE_STRING:
        if keep:
            at.strings += n
            kept = tuple(_read_string(at, what) for _ in range(n))
            if all(isinstance(s, str) for s in kept):
                return tuple(s for s in kept if isinstance(s, str))
        else:
            at.skip_strings(n, what)
        return SkippedArray("string", n)
    if keep:
        return struct.unpack(f"<{n}{_SCALARS[item]}", at.raw(least, what))
    at.skip(least, what)
    return SkippedArray("number", n)


def _alignment(at: Cursor, kv: dict[str, KvValue]) -> int:
    value = kv.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1):
        raise at.fail(f"general.alignment is {value!r}, not a power of two")
    return value


def _read_entries(at: Cursor, n_tensors: int) -> list[Entry]:
    entries: list[Entry] = []
    seen: set[str] = set()
    for i in range(n_tensors):
        start = at.here
        name = at.text(MAX_NAME_NBYTES, f"the name of tensor {i + 1} of {n_tensors}")
        what = f"tensor {quote(name)}"
        if name in seen:
            raise at.fail(f"{what} is there twice, again at byte {start}")
        seen.add(name)
        n_dims = at.u32(what)
        if n_dims > 4:
            raise at.fail(f"{what} at byte {start} has {n_dims} dimensions, more than 4")
        shape = struct.unpack(f"<{n_dims}Q", at.raw(8 * n_dims, what))
        type_id, offset = at.u32(what), at.u64(what)
        n = 1
        for d in shape:
            n *= d
        if n > MAX_NBYTES or any(d > MAX_NBYTES for d in shape):
            raise at.fail(f"{what} at byte {start} has the shape {shape}: too many elements")
        entries.append(Entry(name, type_id, shape, offset))
    return entries
