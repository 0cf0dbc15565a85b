"""A model's identity: the same after renaming, moving or linking, another for other weights of the same shape.

It hashes the keys, every tensor's name, type, shape and size, and 4 KiB from the middle of up to 64 tensors, so a 60 GB
model takes about 64 small reads. Two files that differ only in bytes that were not sampled are not told apart: a
quantisation changes all weights, a damaged disk block does not. Not here: damage (`header` finds what is cut short).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from expertd.errors import ModelChangedError
from expertd.model.gguf import GgufModel, read_exactly
from expertd.model.tensors import TensorInfo

_SAMPLES = 64
_SAMPLE_NBYTES = 4096


def fingerprint(model: GgufModel) -> str:
    """32 hex digits. Reads at most 64 x 4 KiB. Raises ModelChangedError where a file is shorter or gone by now."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(model.kv):
        if not key.startswith("split."):
            digest.update(f"{key}={model.kv[key]!r}\n".encode())
    ordered = sorted(model.tensors, key=lambda t: t.name)
    for t in ordered:
        digest.update(f"{t.name} {t.type_id} {t.shape} {t.nbytes}\n".encode())
    sampled = [t for t in ordered if t.nbytes]
    step = max(1, -(-len(sampled) // _SAMPLES))
    _hash_samples(digest, model.files, sampled[::step])
    return digest.hexdigest()


def _hash_samples(digest: hashlib.blake2b, files: tuple[Path, ...], tensors: list[TensorInfo]) -> None:
    handles: dict[int, int] = {}
    try:
        for t in tensors:
            if t.file not in handles:
                handles[t.file] = os.open(files[t.file], os.O_RDONLY | os.O_CLOEXEC)
                read_exactly(handles[t.file])
            nbytes = min(_SAMPLE_NBYTES, t.nbytes)
            data = os.pread(handles[t.file], nbytes, t.offset + (t.nbytes - nbytes) // 2)
            if len(data) < nbytes:
                raise ModelChangedError(f"{files[t.file]}: was cut while being read", hint="is it still downloading?")
            digest.update(data)
    except OSError as error:
        raise ModelChangedError(f"{error.filename or files[0]}: {error.strerror}", hint="check the disk") from error
    finally:
        for handle in handles.values():
            os.close(handle)
