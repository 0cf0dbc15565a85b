"""Every call to the C library that steering needs, with its argument types set once.

ctypes lets go of the GIL during each of these calls, so a read-ahead that takes a millisecond stops no other thread.
The functions for hot paths return 0 or an errno instead of raising. What the calls are used for lies in the modules
beside this one; `os.posix_fadvise` and the rest of what Python already has are called directly there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

PAGE = mmap.PAGESIZE

MADV_NORMAL = 0
MADV_RANDOM = 1
MADV_SEQUENTIAL = 2
MADV_WILLNEED = 3
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_COLD = 20
MADV_PAGEOUT = 21
MADV_POPULATE_READ = 22

PROT_READ = 1
MAP_SHARED = 1
MAP_PRIVATE = 2
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_FAILED = ctypes.c_void_p(-1).value

# The newer calls have one number on every architecture (the table was unified at 5.x), mincore and friends go by name.
_SYS_CACHESTAT = 451
_CACHESTAT_MACHINES = frozenset({"x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64"})


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class CacheStat:
    """Pages of a file range: in the page cache now, and dropped so lately that the kernel would call it a refault."""

    cached: int
    recently_evicted: int


@cache
def _libc() -> ctypes.CDLL:
    lib = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer, offset = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    for name, result, arguments in (
        ("madvise", integer, (pointer, size, integer)),
        ("mlock", integer, (pointer, size)),
        ("munlock", integer, (pointer, size)),
        ("mincore", integer, (pointer, size, pointer)),
        ("mmap", pointer, (pointer, size, integer, integer, integer, offset)),
        ("munmap", integer, (pointer, size)),
        ("readahead", ctypes.c_ssize_t, (integer, ctypes.c_int64, size)),
        ("preadv2", ctypes.c_ssize_t, (integer, pointer, integer, offset, integer)),
        ("sigaction", integer, (integer, pointer, pointer)),
        ("syscall", ctypes.c_long, None),
    ):
        function = getattr(lib, name, None)
        if function is None:
            continue
        function.restype = result
        if arguments is not None:
            function.argtypes = arguments
    return lib


def sigaction_call() -> Any:
    """The bare `sigaction(number, new, old) -> 0 | -1`."""
    return _libc().sigaction


class Touch:
    """A read of file pages that neither waits nor copies: it only makes the kernel's read-ahead see an access.

    RWF_NOWAIT keeps it from waiting, and the null buffer from copying a page that is there (EFAULT). Returns whether
    the first page was there, up to date. One per thread.
    """

    class _Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))

    _NOWAIT = 8

    def __init__(self) -> None:
        self._vector = self._Vector(None, 0)
        self._address = ctypes.addressof(self._vector)
        self._call = getattr(_libc(), "preadv2", None)

    @property
    def possible(self) -> bool:
        return self._call is not None

    def __call__(self, fd: int, offset: int, nbytes: int) -> bool:
        self._vector.nbytes = nbytes
        assert self._call is not None
        return self._call(fd, self._address, 1, offset, self._NOWAIT) == -1 and ctypes.get_errno() == errno.EFAULT


def madvise(address: int, nbytes: int, advice: int) -> int:
    """0 or an errno. `address` lies on a page border."""
    return 0 if _libc().madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


def mlock(address: int, nbytes: int) -> int:
    """0 or an errno. Faults the range in and waits for it; locks do not stack. EIO where a page cannot be read.

    mlock alone never returns from a page that the disk refuses: it takes "the fault let go of the lock" for "try again"
    (seen on 6.18). MADV_POPULATE_READ does the same reading and gives up; before 5.14 there is none.
    """
    if madvise(address, nbytes, MADV_POPULATE_READ) == errno.EFAULT:
        return errno.EIO
    return 0 if _libc().mlock(address, nbytes) == 0 else ctypes.get_errno()


def munlock(address: int, nbytes: int) -> int:
    """0 or an errno."""
    return 0 if _libc().munlock(address, nbytes) == 0 else ctypes.get_errno()


def readahead(fd: int, offset: int, nbytes: int) -> int:
    """0 or an errno. As WILLNEED, without a mapping."""
    return 0 if _libc().readahead(fd, offset, nbytes) == 0 else ctypes.get_errno()


def map_file(fd: int, nbytes: int) -> int:
    """Address of a shared read-only mapping of a whole file, nothing populated. OSError."""
    address = _libc().mmap(None, nbytes, PROT_READ, MAP_SHARED, fd, 0)
    if address is None or address == MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, errno.errorcode.get(code, "mmap"))
    return int(address)


def map_zeros(address: int, nbytes: int) -> bool:
    """Put private zero pages in place of whatever is mapped there."""
    flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS
    return bool(_libc().mmap(address, nbytes, PROT_READ, flags, -1, 0) == address)


def unmap(address: int, nbytes: int) -> int:
    """0 or an errno."""
    return 0 if _libc().munmap(address, nbytes) == 0 else ctypes.get_errno()


def mincore(address: int, nbytes: int) -> bytes | None:
    """One byte a page, bit 0 set where the page is in the cache; None on error.

    To a caller that neither owns nor may write the file the kernel answers "all resident": ask only as the owner.
    """
    pages = -(-nbytes // PAGE)
    vector = ctypes.create_string_buffer(pages)
    if _libc().mincore(address, nbytes, vector) != 0:
        return None
    return vector.raw


def cachestat(fd: int, offset: int, nbytes: int) -> CacheStat | int:
    """What the page cache holds of a file range (Linux 6.5), or an errno: EPERM without ownership or write
    permission, ENOSYS on an older kernel or a machine whose call number is not known."""
    if platform.machine() not in _CACHESTAT_MACHINES:
        return errno.ENOSYS
    where, found = _Range(offset, nbytes), _CacheStat()
    done = _libc().syscall(
        ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), ctypes.byref(where), ctypes.byref(found), ctypes.c_uint(0)
    )
    if done != 0:
        return ctypes.get_errno()
    return CacheStat(found.cached, found.recently_evicted)
