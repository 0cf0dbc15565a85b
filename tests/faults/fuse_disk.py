"""A disk that can be told to fail or to stand still: one file on a FUSE file system, served by a process of its own.

Speaks the kernel's protocol (fuse(4), linux/fuse.h, minor 31) on /dev/fuse without a library, read-only. The file's
bytes are another file's. `fail` makes reads of a range give EIO, as a bad sector does; `stop` halts the server, as a
disk that hangs does: who reads then waits until `go`. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT_ID, FILE_ID = 1, 2
FILE_NAME = b"model.gguf"
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 26, 27, 28, 29, 36, 42
_SILENT = (_FORGET, _BATCH_FORGET, _INTERRUPT)
_ASYNC_READ, _KEEP_CACHE = 1, 2
_MOST = 1 << 20


class Disk:
    """The controlling side. `path` is the file."""

    def __init__(self, server: subprocess.Popen[str], path: Path) -> None:
        self._server, self.path = server, path

    def fail(self, start: int, end: int) -> None:
        """Reads that touch bytes [start, end) fail from now on."""
        self._tell(f"{start} {end}")

    def heal(self) -> None:
        self._tell("0 0")

    def stop(self) -> None:
        """Reads wait from now on."""
        self._server.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def _tell(self, words: str) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(words + "\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "done\n"


@contextlib.contextmanager
def fuse_disk(source: Path, directory: Path) -> Iterator[Disk]:
    """A disk with the bytes of `source`, mounted at `directory` until the end."""
    directory.mkdir()
    server = subprocess.Popen(
        [sys.executable, __file__, str(source), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "done\n":
            raise OSError("a FUSE file system cannot be mounted")
        yield Disk(server, directory / FILE_NAME.decode())
    finally:
        server.kill()
        server.wait()
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


class _Server:
    def __init__(self, source: Path) -> None:
        self._file = os.open(source, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self.bad = (0, 0)
        self._calls: dict[int, Callable[[int, bytes], bytes]] = {
            _INIT: self._init, _LOOKUP: self._lookup, _GETATTR: self._getattr, _OPEN: self._open, _OPENDIR: self._open,
            _READ: self._read, _READDIR: lambda _n, _b: b"", _RELEASE: lambda _n, _b: b"",
            _RELEASEDIR: lambda _n, _b: b"",
            _STATFS: lambda _n, _b: struct.pack("<5Q10I", 1 << 20, 0, 0, 2, 0, 4096, 255, 4096, *[0] * 7),
        }  # fmt: skip

    def answer(self, request: bytes) -> bytes:
        """The reply to one request; empty where none is due."""
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in _SILENT:
            return b""
        try:
            call = self._calls.get(opcode)
            if call is None:
                # FLUSH among them: refused once it is not asked for again, and processes can end while this one stands.
                raise OSError(errno.ENOSYS, "")
            body, code = call(node, request[_IN.size :]), 0
        except OSError as error:
            body, code = b"", -(error.errno or errno.EIO)
        return _OUT.pack(_OUT.size + len(body), code, unique) + body

    def _init(self, _node: int, body: bytes) -> bytes:
        read_ahead = struct.unpack_from("<4I", body)[2]
        return struct.pack("<4I2H2I2H8I", 7, 31, read_ahead, _ASYNC_READ, 16, 12, _MOST, 1, 0, 0, *[0] * 8)

    def _attributes(self, node: int) -> bytes:
        size, mode, links = (self._size, 0o100644, 1) if node == FILE_ID else (0, 0o040755, 2)
        born = 1_700_000_000
        return _ATTR.pack(node, size, -(-size // 512), born, born, born, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)

    def _lookup(self, node: int, body: bytes) -> bytes:
        if node != ROOT_ID or body.rstrip(b"\0") != FILE_NAME:
            raise OSError(errno.ENOENT, "")
        return struct.pack("<4Q2I", FILE_ID, 0, 3600, 3600, 0, 0) + self._attributes(FILE_ID)

    def _getattr(self, node: int, _body: bytes) -> bytes:
        return struct.pack("<Q2I", 3600, 0, 0) + self._attributes(node)

    def _open(self, _node: int, _body: bytes) -> bytes:
        return struct.pack("<Q2I", 1, _KEEP_CACHE, 0)

    def _read(self, _node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        if max(offset, self.bad[0]) < min(offset + size, self.bad[1]):
            raise OSError(errno.EIO, "")
        return os.pread(self._file, size, offset)


def _mount(fd: int, directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"expertd-test", directory.encode(), b"fuse", 6, options) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount: {os.strerror(code)}")


def _main(source: str, directory: str) -> None:
    import select

    server, fd = _Server(Path(source)), os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    _mount(fd, directory)
    print("done", flush=True)
    while True:
        for ready in select.select([fd, 0], [], [])[0]:
            if ready == 0:
                words = os.read(0, 4096).split()
                if not words:
                    return
                server.bad = (int(words[0]), int(words[1]))
                print("done", flush=True)
                continue
            try:
                reply = server.answer(os.read(fd, _MOST + 4096))
                if reply:
                    os.write(fd, reply)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    raise


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
