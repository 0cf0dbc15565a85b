"""Recorded routes on disk: a versioned binary file that a crash costs at most the last second of, and its CSV form.

Layout: the magic `EXPERTDT`, u16 version, u16 0, u32 length and that much JSON (model, fingerprint, layers, experts,
experts_used, expert_bytes by layer, started); then blocks, each a u32 length, a u32 CRC-32 and the payload. A payload
is records: u32 step, u16 layer, u8 phase, u8 0, u32 n and n u16 expert indices, all little-endian. A reader stops at
the first block that is cut short or does not match: what comes before it is whole. Keys of the JSON that a reader does
not know it ignores; a change that older readers would misread raises the version, and these refuse the file by name.

Routes tell something of the text they came from: files are readable by their owner alone. Not here: when recording
begins and ends (`tracing`), replaying.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from expertd.errors import StateError
from expertd.runtime.profile_file import set_aside

MAGIC = b"EXPERTDT"
VERSION = 1
_PREFIX = struct.Struct("<8sHHI")
_BLOCK = struct.Struct("<II")
_RECORD = struct.Struct("<IHBBI")
_MAX_HEADER, _MAX_BLOCK = 1 << 20, 1 << 26


@dataclass(frozen=True, slots=True)
class Route:
    """`ids` are expert indices, k of them for a token, k * tokens for a prompt's batch; `phase` as in `types.Phase`."""

    step: int
    layer: int
    phase: int
    ids: tuple[int, ...]


def pack(step: int, layer: int, phase: int, ids: Sequence[int]) -> bytes:
    """One record."""
    return _RECORD.pack(step & 0xFFFFFFFF, layer, phase, 0, len(ids)) + struct.pack(f"<{len(ids)}H", *ids)


class TraceWriter:
    """Appends blocks. One thread. OSError where the disk does not let it."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        text = json.dumps(header).encode()
        self.nbytes = 0
        self._write(_PREFIX.pack(MAGIC, VERSION, 0, len(text)) + text)

    def block(self, payload: bytes) -> None:
        """One block, whole for a reader once it is written."""
        self._write(_BLOCK.pack(len(payload), zlib.crc32(payload)) + payload)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            n = os.write(self._fd, view)
            self.nbytes += n
            view = view[n:]

    def close(self) -> None:
        os.close(self._fd)


def make_room(path: Path) -> Path | None:
    """Before a new trace is written in the place of an older one. What a newer expertd wrote is set aside, and its new
    name returned. StateError for a file that is no trace, or that cannot be read or moved."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    if prefix and prefix[: len(MAGIC)] != MAGIC[: len(prefix)]:
        raise StateError(f"{path} is there and is no trace of expertd", hint="choose another trace.path")
    if len(prefix) < _PREFIX.size or _PREFIX.unpack(prefix)[1] <= VERSION:
        return None
    aside = set_aside(path, "newer")
    if aside is None:
        raise StateError(f"{path} is of a newer expertd and cannot be moved away", hint="choose another trace.path")
    return aside


def read_header(file: BinaryIO, name: str) -> dict[str, Any]:
    """The header; the file is left at its first block. StateError."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
        raise StateError(f"{name}: is no trace of expertd")
    _, version, _, length = _PREFIX.unpack(prefix)
    if version > VERSION:
        raise StateError(f"{name}: is of version {version}; this expertd reads up to {VERSION}", hint="upgrade expertd")
    text = file.read(length) if length <= _MAX_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise StateError(f"{name}: its header is torn") from error
    return header


def read_routes(file: BinaryIO) -> Iterator[Route]:
    """The routes of all whole blocks, in order."""
    while True:
        head = file.read(_BLOCK.size)
        if len(head) < _BLOCK.size:
            return
        length, crc = _BLOCK.unpack(head)
        payload = file.read(length) if length <= _MAX_BLOCK else b""
        if len(payload) < length or zlib.crc32(payload) != crc:
            return
        at = 0
        while at + _RECORD.size <= length:
            step, layer, phase, _, n = _RECORD.unpack_from(payload, at)
            at += _RECORD.size
            if at + 2 * n > length:
                return
            yield Route(step, layer, phase, struct.unpack_from(f"<{n}H", payload, at))
            at += 2 * n


def csv_lines(header: dict[str, Any], routes: Iterable[Route]) -> Iterator[str]:
    """The column form that `expertd replay` also reads: one row a routed expert; a prompt's batch token by token."""
    sizes, k = header.get("expert_bytes", {}), max(1, int(header.get("experts_used", 1)))
    yield "# route_trace v1"
    yield (
        f"# model={header.get('model', '')} n_layer={header.get('layers', 0)} n_expert={header.get('experts', 0)} "
        f"n_expert_used={k}"
    )
    for layer, nbytes in sizes.items():
        yield f"# layer={layer} expert_bytes={nbytes} dense_bytes=0"
    yield "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    for r in routes:
        nbytes = sizes.get(str(r.layer), 0)
        for i, expert in enumerate(r.ids):
            step = r.step + (i // k if r.phase == 0 else 0)
            yield f"0,{r.phase},{step},{r.layer},{i % k},{expert},0,0,{nbytes}"
