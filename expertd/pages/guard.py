"""Outlive a model file that is cut under the daemon: a fault beyond its end says so instead of killing the process.

A load from a mapped page that the file no longer has raises SIGBUS in the computing thread. The guard's handler, which
C calls in that thread, puts zero pages in place of what is gone and notes which file it was; the computation goes on
with zeros, and its result must not be used: the engine asks `fault` after each step, before a token leaves the house.
A SIGBUS anywhere else ends the process as it would have without a guard.

`MappedFiles.check` notices the same without a fault, and also a file that was replaced or rewritten.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from expertd.errors import ModelChangedError
from expertd.pages import libc, ranges
from expertd.pages.mapping import MappedFile, MappedFiles

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
    """Install once, on any thread; `close` puts the former handler back. One a process."""

    def __init__(self, mapping: MappedFiles) -> None:
        self._mapping = mapping
        self._fault = ""
        self._handler: Any = _Handler(self._on_bus)
        self._former = _SigAction()
        self._installed = False

    def install(self) -> None:
        action = _SigAction()
        action.handler = ctypes.cast(self._handler, ctypes.c_void_p).value
        action.flags = _SA_SIGINFO
        self._installed = _sigaction(ctypes.byref(action), ctypes.byref(self._former)) == 0

    @property
    def installed(self) -> bool:
        return self._installed

    @property
    def fault(self) -> str:
        """What was read that is gone; empty while all is well."""
        return self._fault

    def check(self) -> None:
        """Raise ModelChangedError after a fault. Costs an attribute read."""
        if self._fault:
            raise ModelChangedError(self._fault, hint="restart expertd with a sound file")

    def close(self) -> None:
        if self._installed:
            _sigaction(ctypes.byref(self._former), None)
            self._installed = False

    def _on_bus(self, number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _SI_ADDR).value or 0
        for f in self._mapping.files:
            if f.base <= address < f.base + f.nbytes and self._patch(f, address - f.base):
                return
        # Not ours: the instruction runs again, and now it kills.
        signal_default = _SigAction()
        _sigaction(ctypes.byref(signal_default), None)

    def _patch(self, f: MappedFile, offset: int) -> bool:
        size = os.fstat(f.fd).st_size
        page = libc.PAGE
        start, end = ranges.floor(offset, page), ranges.ceil(f.nbytes, page)
        if size < f.nbytes:
            start = min(start, ranges.ceil(size, page))
            what = f"{f.path} was cut by {f.nbytes - size} bytes while it was in use"
        else:
            end = start + page
            what = f"{f.path} cannot be read at byte {offset}"
        if not libc.map_zeros(f.base + start, end - start):
            return False
        if not self._fault:
            self._fault = what
            os.write(2, f"expertd: {what}\n".encode(errors="replace"))
        return True


def _sigaction(new: Any, old: Any) -> int:
    return int(libc.sigaction_call()(signal.SIGBUS, new, old))
