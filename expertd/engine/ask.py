"""A filter in front of the tap's callback, in machine code: it says no to every node but the tap's without Python.

llama.cpp asks about each node of the graph. In Python that costs 14 to 18 us a layer (`bench.tap_cost`), most of it
ctypes' own: 0.7 to 0.9 ms a token of 48 layers. The filter compares eight bytes of the node's name and jumps to the
callback where they are the mark, or where a computed node is shown:

    test  sil, sil          ; ask?
    je    callback
    mov   rax, MARK
    cmp   [rdi + AT], rax   ; rdi: the node
    je    callback
    xor   eax, eax
    ret
    callback: mov rax, CALLBACK
    jmp   rax

For x86-64 Linux (System V calling convention). Elsewhere, where the kernel grants no executable mapping, and where the
trial at the start goes wrong, there is no filter, and the callback is asked about every node. The page is mapped from a
memfd and never writable, which systemd's MemoryDenyWriteExecute allows.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import weakref
from functools import cache
from typing import Any

_CALLBACK_TYPE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def _code(at: int, mark: int, callback: int) -> bytes:
    def word(n: int) -> bytes:
        return n.to_bytes(8, "little")

    return b"".join(
        (
            b"\x40\x84\xf6\x74\x16\x48\xb8", word(mark),
            b"\x48\x39\x87", at.to_bytes(4, "little"), b"\x74\x03\x31\xc0\xc3\x48\xb8", word(callback), b"\xff\xe0",
        )
    )  # fmt: skip


@cache
def _libc() -> ctypes.CDLL:
    lib = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    lib.mmap.restype, lib.mmap.argtypes = pointer, (pointer, size, integer, integer, integer, ctypes.c_long)
    lib.munmap.restype, lib.munmap.argtypes = integer, (pointer, size)
    return lib


def _map(code: bytes) -> int:
    """Address of a page with the code that can be executed and not written. OSError where that is not granted."""
    fd = os.memfd_create("expertd-ask", os.MFD_CLOEXEC)
    try:
        os.write(fd, code.ljust(mmap.PAGESIZE, b"\xcc"))
        address = _libc().mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no executable memory")
    return int(address)


def _unmap(address: int) -> None:
    _libc().munmap(address, mmap.PAGESIZE)


def filtered(callback: Any, at: int, mark: int) -> Any | None:
    """A function pointer of the callback's type that calls `callback` (a ctypes function) for nodes with the 8-byte
    number `mark` at byte `at`, and for all that are shown; None where there can be no filter. Keeps `callback` alive.
    """
    if platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8 or not _works(at, mark):
        return None
    return _filtered(callback, at, mark)


def _filtered(callback: Any, at: int, mark: int) -> Any | None:
    target = ctypes.cast(callback, ctypes.c_void_p).value or 0
    try:
        address = _map(_code(at, mark, target))
    except OSError:
        return None
    made = type(callback)(address)
    made.callback = callback
    # Not at the process's end: a decoding thread may still be asking.
    weakref.finalize(made, _unmap, address).atexit = False
    return made


def _works(at: int, mark: int) -> bool:
    """The trial: a node of another name, one of the tap's, and one that is shown."""
    called: list[bool] = []

    def note(_node: int, ask: bool, _user: object) -> bool:
        called.append(ask)
        return True

    trial = _filtered(_CALLBACK_TYPE(note), at, mark)
    if trial is None:
        return False
    node = ctypes.create_string_buffer(at + 8)
    address = ctypes.addressof(node)
    other = trial(address, True, None)
    ctypes.c_uint64.from_address(address + at).value = mark
    answers = other, trial(address, True, None), trial(address, False, None)
    return answers == (False, True, True) and called == [True, False]
