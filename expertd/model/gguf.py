"""Opens a GGUF model: one file or all the shards of a split one, whichever of them was named.

Not here: the bytes of one header (`header`), what the tensors mean (`expertmap`).

How the shards are found: `split.count` above 1 says the model is split. Their names follow llama.cpp's pattern
NAME-00001-of-00003.gguf, read off the path as given; where that has another name (a link), off the link's target.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from expertd.errors import ModelFormatError, ModelNotFoundError
from expertd.model.cursor import quote
from expertd.model.header import Header, KvValue, read_header
from expertd.model.tensors import TensorInfo

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 4096


@dataclass(frozen=True)
class GgufModel:
    """The header of a whole model. Tensors' offsets are absolute in their file; arrays of the tokenizer are lengths."""

    files: tuple[Path, ...]
    file_nbytes: tuple[int, ...]
    data_offsets: tuple[int, ...]
    kv: dict[str, KvValue]
    tensors: tuple[TensorInfo, ...]
    warnings: tuple[str, ...]

    @property
    def arch(self) -> str:
        """general.architecture, or empty."""
        value = self.kv.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def name(self) -> str:
        """general.name, else the file's name without its ending."""
        value = self.kv.get("general.name")
        if isinstance(value, str) and value:
            return value
        found = _SHARD.fullmatch(self.files[0].name)
        return found[1] if found else self.files[0].stem

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {t.name: t for t in self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.file_nbytes)

    @property
    def tensor_nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def n_elements(self) -> int:
        """Parameters, as the tensors' shapes give them."""
        return sum(t.n_elements for t in self.tensors)

    def key(self, suffix: str) -> KvValue | None:
        """The value of an architecture's key: `key("block_count")` is qwen3moe.block_count for a qwen3moe."""
        return self.kv.get(f"{self.arch}.{suffix}")

    def integer(self, suffix: str) -> int | None:
        """An architecture's key as a whole number; the largest where it is an array by layer; None where absent."""
        value = self.key(suffix)
        if isinstance(value, tuple):
            numbers = [v for v in value if isinstance(v, int)]
            return max(numbers) if numbers else None
        return int(value) if isinstance(value, int) else None

    def integers(self, suffix: str, n: int, default: int = 0) -> list[int]:
        """An architecture's key by layer, `n` of them: an array as it is, a number repeated, `default` where absent."""
        value = self.key(suffix)
        if isinstance(value, tuple):
            numbers = [int(v) if isinstance(v, int) else default for v in value[:n]]
            return numbers + [default] * (n - len(numbers))
        return [int(value) if isinstance(value, int) else default] * n

    def number(self, suffix: str) -> float | None:
        value = self.key(suffix)
        return float(value) if isinstance(value, int | float) else None


def read_model(path: str | Path) -> GgufModel:
    """Read the header of a model and of all its shards. Reads no weights.

    Raises ModelNotFoundError (no such file, a shard that is missing, a directory that may not be entered) and
    ModelFormatError (damaged, cut short, of another kind).
    """
    path = Path(path)
    first = _read_file(path, 0)
    count = _split_int(first, "split.count", 1)
    if count <= 1:
        return _joined([first], [path])
    if count > MAX_SHARDS:
        raise ModelFormatError(f"{path}: split.count says {count} shards", hint="more than any model has; damaged")
    paths = _shard_paths(path, count)
    missing = [p for p in paths if not p.exists()]
    if missing:
        names = ", ".join(p.name for p in missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelNotFoundError(
            f"{path}: the model is split in {count} files and {names} "
            f"{'is' if len(missing) == 1 else 'are'} missing in {missing[0].parent}",
            hint="put all shards in one directory",
        )
    headers = [first if i == 0 and p == path else _read_file(p, i) for i, p in enumerate(paths)]
    for i, h in enumerate(headers):
        no, total = _split_int(h, "split.no", i), _split_int(h, "split.count", count)
        if (no, total) != (i, count):
            raise ModelFormatError(
                f"{h.path}: says it is shard {no + 1} of {total}, its name says {i + 1} of {count}",
                hint="the shards are mixed up: download them again",
            )
    return _joined(headers, paths)


def read_exactly(descriptor: int) -> None:
    """What is read through the descriptor brings in no more than was asked for: the kernel's read-ahead, up to 8 MiB
    where it is set for streaming, would fill the page cache with weights that nobody has chosen."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def _joined(headers: list[Header], paths: list[Path]) -> GgufModel:
    tensors: list[TensorInfo] = []
    for h in headers:
        tensors.extend(h.tensors)
    seen: dict[str, TensorInfo] = {}
    for t in tensors:
        if t.name in seen:
            raise ModelFormatError(
                f"{paths[t.file]}: tensor {quote(t.name)} is in {paths[seen[t.name].file].name} as well",
                hint="the shards are mixed up: download them again",
            )
        seen[t.name] = t
    kv: dict[str, KvValue] = {}
    for h in reversed(headers):
        kv.update(h.kv)
    promised = kv.get("split.tensors.count") if len(headers) > 1 else None
    if isinstance(promised, int) and promised != len(tensors):
        raise ModelFormatError(
            f"{paths[0]}: the shards hold {len(tensors)} tensors, the header promises {promised}",
            hint="the shards are mixed up: download them again",
        )
    several = len(headers) > 1
    warnings = tuple(f"{h.path.name}: {w}" if several else w for h in headers for w in h.warnings)
    return GgufModel(
        tuple(paths),
        tuple(h.nbytes for h in headers),
        tuple(h.data_offset for h in headers),
        kv,
        tuple(tensors),
        warnings,
    )


def _split_int(header: Header, key: str, default: int) -> int:
    value = header.kv.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelFormatError(f"{header.path}: {key} is {value!r}, not a count", hint="the header is damaged")
    return value


def _shard_paths(path: Path, count: int) -> list[Path]:
    """Where the shards should be. The name as given comes first: a download cache links names to hashed blobs."""
    seen: set[Path] = set()
    at = path
    while True:
        found = _SHARD.fullmatch(at.name)
        if found and int(found[3]) == count:
            return [at.with_name(f"{found[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        if not at.is_symlink() or at in seen:
            break
        seen.add(at)
        at = at.parent / os.readlink(at)
    raise ModelNotFoundError(
        f"{path}: is one of {count} shards, but its name does not say which",
        hint=f"name the shards NAME-00001-of-{count:05d}.gguf and so on",
    )


def _read_file(path: Path, number: int) -> Header:
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ModelNotFoundError(f"{path}: is a directory", hint="name the .gguf file in it (any shard will do)")
        if not stat.S_ISREG(found.st_mode):
            raise ModelNotFoundError(f"{path}: is no regular file", hint="name a .gguf file")
        with path.open("rb", buffering=0) as file:
            read_exactly(file.fileno())
            return read_header(file, found.st_size, path, number)
    except PermissionError as error:
        raise ModelNotFoundError(
            f"{path}: {_barrier(path)} may not be read by this user (uid {os.geteuid()})",
            hint="grant access to it, or move the model (a service with ProtectHome cannot see /home)",
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        where = _barrier(path) if isinstance(error, FileNotFoundError) else path
        same = where == path
        raise ModelNotFoundError(
            f"{path}: {reason.lower()}" if same else f"{path}: {where}: {reason.lower()}", hint="check the path"
        ) from error


def _barrier(path: Path) -> Path:
    """The first component of the path, links followed, that is not there or may not be entered or read."""
    for part in [*reversed(path.absolute().parents), path]:
        try:
            mode = os.R_OK if part == path else os.X_OK
            part.stat()
            if not os.access(part, mode):
                return part
        except OSError:
            return part
    return path
