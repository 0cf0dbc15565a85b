"""Writing a large model file: streamed, out of the page cache again as it goes, whole or not there at all.

The header is made by gguf's writer. What is written is decided by `synth` and `inflate`; where, and whether there is
room, by `space`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from expertd.errors import BenchError, ModelError
from expertd.model.gguf import read_model

RECIPE_KEY = "expertd.bench.recipe"
"""Metadata that says how a file was made, so that it need not be made again."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_DROP_EVERY = 256 << 20


def silent(done: int, total: int) -> None:
    """A Progress that shows nothing."""


class ModelFile:
    """`path` being written, under another name until it is whole. A context manager: an error removes what there is.

    `writer` is a gguf.GGUFWriter: add keys and tensor infos, call `begin`, then write every tensor's bytes in order.
    """

    def __init__(self, path: Path, arch: str, total_nbytes: int, progress: Progress) -> None:
        from gguf import GGUFWriter

        self.path = path
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._total = total_nbytes
        self._progress = progress
        self._done = self._dropped = 0
        self._file: Any = None
        self.writer: Any = GGUFWriter(self._part, arch)

    def begin(self) -> None:
        """Write the header; after this only tensor bytes may come."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        self._file = self.writer.fout[0]
        self.pad()

    def write(self, data: bytes | memoryview) -> None:
        """Append tensor bytes. Raises BenchError when the disk is full."""
        try:
            self._file.write(data)
            self._done += len(data)
            if self._done - self._dropped >= _DROP_EVERY:
                self._drop_behind()
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise BenchError(f"{self.path}: {os.strerror(e.errno)}", hint="choose another --dir") from e
        self._progress(self._done, self._total)

    def pad(self) -> None:
        """Fill up to the file's alignment, as every tensor's end must be."""
        self._file.write(bytes(-self._file.tell() % self.writer.data_alignment))

    def _drop_behind(self) -> None:
        # A file made for a cold-cache benchmark should not push out what the machine's other work has cached.
        self._file.flush()
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = self._done

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._drop_behind()
        self.writer.close()
        if kind is None:
            self._part.rename(self.path)
        else:
            self._part.unlink(missing_ok=True)


def made_by(path: Path, recipe: str) -> bool:
    """Whether there is a sound file at `path` that was made by this recipe."""
    if not path.exists():
        return False
    try:
        return read_model(path).kv.get(RECIPE_KEY) == recipe
    except ModelError:
        return False
