"""Loads a model without reading it: llama.cpp maps with MAP_POPULATE, which reads the whole file first.

libllama calls mmap, posix_madvise and posix_fadvise through its relocation table. For the time of a load the entries
point to callbacks that drop the populate flag and the read-ahead advice for file mappings; afterwards they are put
back. Where the table cannot be patched (another object format, a hardened libc) the load is stock and the reason is
returned, never raised.

Source of the flags: llama.cpp src/llama-mmap.cpp at 0c1e57098. ELF64 layout: System V ABI, x86-64 and AArch64
supplements (JUMP_SLOT and GLOB_DAT entries are patched the same way on both).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAP_POPULATE = 0x8000
_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_SYMBOL_NBYTES, _RELA_NBYTES = 24, 24

_MMAP = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)
_MADVISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FADVISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int)


@dataclass
class LazyLoad:
    """What happened: `active` while and after the patch held, `reason` when it could not be made, and how many file
    mappings were made without populating them."""

    active: bool = False
    reason: str = ""
    mappings: int = 0
    _keep: list[Any] = field(default_factory=list)


@contextmanager
def lazy_load(library: Path, enabled: bool = True) -> Iterator[LazyLoad]:
    """While the context holds, `library` maps files without reading them. The table is restored on the way out."""
    state = LazyLoad()
    if not enabled:
        state.reason = "switched off"
        yield state
        return
    patched: list[tuple[int, int]] = []
    try:
        try:
            slots = _relocation_slots(library)
            hooks = _hooks(state)
            for name, address in hooks.items():
                for slot in slots[name]:
                    patched.append((slot, _swap(slot, address)))
            state.active = True
        except (OSError, KeyError, ValueError, struct.error) as error:
            state.reason = f"{library.name}'s relocation table cannot be patched: {error}"
            _restore(patched)
            patched = []
        yield state
    finally:
        _restore(patched)


def _hooks(state: LazyLoad) -> dict[str, int]:
    libc = ctypes.CDLL(None, use_errno=True)

    def address(name: str) -> int:
        return ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0

    real_mmap = _MMAP(address("mmap"))

    def mmap_hook(addr: int, length: int, prot: int, flags: int, fd: int, offset: int) -> int:
        if fd >= 0:
            state.mappings += 1
            flags &= ~_MAP_POPULATE
        return int(real_mmap(addr, length, prot, flags, fd, offset) or 0)

    def no_advice(_address: int, _length: int, _advice: int) -> int:
        return 0

    def no_file_advice(_fd: int, _offset: int, _length: int, _advice: int) -> int:
        return 0

    callbacks = {
        "mmap": _MMAP(mmap_hook),
        "posix_madvise": _MADVISE(no_advice),
        "posix_fadvise": _FADVISE(no_file_advice),
    }
    state._keep += [real_mmap, *callbacks.values()]
    return {name: ctypes.cast(callback, ctypes.c_void_p).value or 0 for name, callback in callbacks.items()}


def _restore(patched: list[tuple[int, int]]) -> None:
    for slot, old in reversed(patched):
        _swap(slot, old)


def _swap(slot: int, value: int) -> int:
    """Writes a pointer into a (possibly RELRO) table slot; returns what was there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = slot & ~(mmap.PAGESIZE - 1)
    before = _protection(slot)
    if libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    entry = ctypes.c_void_p.from_address(slot)
    old = entry.value or 0
    entry.value = value
    libc.mprotect(page, mmap.PAGESIZE, before)
    return old


def _protection(address: int) -> int:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, flags = line.split(maxsplit=2)[:2]
            start, end = (int(x, 16) for x in span.split("-"))
            if start <= address < end:
                return (mmap.PROT_READ if "r" in flags else 0) | (mmap.PROT_WRITE if "w" in flags else 0)
    raise ValueError("the table is not mapped")


def _base_address(library: Path) -> int:
    real = os.path.realpath(library)
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].rstrip("\n") == real:
                return int(fields[0].split("-")[0], 16) - int(fields[2], 16)
    raise ValueError("the library is not loaded")


def _relocation_slots(library: Path) -> dict[str, list[int]]:
    """Addresses of the table entries for mmap, posix_madvise and posix_fadvise. KeyError when mmap has none."""
    base = _base_address(library)
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF")
    tags = _dynamic_tags(data)
    found: dict[str, list[int]] = {"mmap": [], "posix_madvise": [], "posix_fadvise": []}
    for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        start = tags.get(table, 0)
        for at in range(start, start + tags.get(size, 0) if start else 0, _RELA_NBYTES):
            offset, info = struct.unpack_from("<QQ", data, at)
            symbol = info >> 32
            if not symbol:
                continue
            at_name = tags[_DT_STRTAB] + struct.unpack_from("<I", data, tags[_DT_SYMTAB] + symbol * _SYMBOL_NBYTES)[0]
            name = data[at_name : data.index(b"\0", at_name)].decode("ascii", "replace").removesuffix("64")
            if name in found:
                found[name].append(base + offset)
    if not found["mmap"]:
        raise KeyError("no entry for mmap")
    return found


def _dynamic_tags(data: bytes) -> dict[int, int]:
    headers_at = struct.unpack_from("<Q", data, 32)[0]
    entry_size, count = struct.unpack_from("<HH", data, 54)
    for i in range(count):
        kind, _flags, offset, _va, _pa, size = struct.unpack_from("<IIQQQQ", data, headers_at + i * entry_size)
        if kind == _PT_DYNAMIC:
            pairs = struct.iter_unpack("<QQ", data[offset : offset + size])
            return dict(pairs)
    raise ValueError("no dynamic section")
