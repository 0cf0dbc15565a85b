"""Outlive a model file that is cut or cannot be read: such a fault is told of instead of killing the process.

A load from a mapped page that the file no longer has, or that the disk does not give, raises SIGBUS in the computing
thread. The guard's handler, which C calls in that thread, puts zero pages in place of what is missing and notes which
file it was; the computation goes on with zeros, and its result must not be used: the engine calls `check` after the
load and after each step, before a token leaves the house. A SIGBUS anywhere else ends the process as it would have
without a guard.

Whose page it was is looked up in the process's own maps when it happens, so that the guard can stand before llama.cpp
maps and reads the files.

`MappedFiles.check` notices the same without a fault, and also a file that was replaced or rewritten.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertd.errors import ModelChangedError
from expertd.pages import libc, ranges
from expertd.pages.mapping import find_address, unreadable

_SA_SIGINFO = 4
# Offset of si_addr in siginfo_t where longs have 64 bits.
_SI_ADDR = 16


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class BusGuard:
    """Of a model's files. Install once, on any thread; `close` puts the former handler back. One a process."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """OSError where a file cannot be opened."""
        self._installed = False
        self._files: list[tuple[Path, int, int]] = []
        try:
            for path in paths:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._files.append((path, fd, os.fstat(fd).st_size))
        except OSError:
            self.close()
            raise
        self._fault: ModelChangedError | None = None
        self._lock = threading.Lock()
        """Threads that compute one matrix meet the same page at once."""
        self._patched: list[tuple[int, int]] = []
        self._handler: Any = _Handler(self._on_bus)
        self._former = _SigAction()

    def install(self) -> None:
        action = _SigAction()
        action.handler = ctypes.cast(self._handler, ctypes.c_void_p).value
        action.flags = _SA_SIGINFO
        self._installed = _sigaction(ctypes.byref(action), ctypes.byref(self._former)) == 0

    @property
    def installed(self) -> bool:
        return self._installed

    @property
    def mended(self) -> int:
        """Ranges of zeros that stand in for what could not be read."""
        return len(self._patched)

    def check(self) -> None:
        """Raise ModelChangedError, or ModelReadError, after a fault. Costs an attribute read."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        if self._installed:
            _sigaction(ctypes.byref(self._former), None)
            self._installed = False
        while self._files:
            os.close(self._files.pop()[1])

    def _on_bus(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _SI_ADDR).value or 0
        with self._lock:
            if self._mend(address):
                return
        # Not ours: the instruction runs again, and now meets whoever was there before, or kills.
        _sigaction(ctypes.byref(self._former), None)

    def _mend(self, address: int) -> bool:
        if any(start <= address < end for start, end in self._patched):
            # Another thread met the same page, and it is mended by now.
            return True
        for path, fd, nbytes in self._files:
            base = find_address(address, path, fd)
            if base is not None:
                return self._patch(path, fd, nbytes, base, address - base)
        return False

    def _patch(self, path: Path, fd: int, nbytes: int, base: int, offset: int) -> bool:
        size, page = os.fstat(fd).st_size, libc.PAGE
        start, end = ranges.floor(offset, page), ranges.ceil(nbytes, page)
        fault: ModelChangedError
        if size < nbytes:
            start = min(start, ranges.ceil(size, page))
            cut = f"{path} was cut by {nbytes - size} bytes while it was in use"
            fault = ModelChangedError(cut, hint="restart expertd with a sound file")
        else:
            end = start + page
            fault = unreadable(path, offset)
        if not libc.map_zeros(base + start, end - start):
            return False
        self._patched.append((base + start, base + end))
        if self._fault is None:
            self._fault = fault
            os.write(2, f"expertd: {fault.message}\n".encode(errors="replace"))
        return True


def _sigaction(new: Any, old: Any) -> int:
    return int(libc.sigaction_call()(signal.SIGBUS, new, old))
