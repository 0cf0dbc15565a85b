"""What of llama.cpp's binary interface is relied upon, and the check at start that it is still so.

llama-cpp-python mirrors C structs by hand and they change between releases, so the package range is pinned in
pyproject.toml and `check()` compares what this build says with what was read in its source. The tensor struct has no
mirror in the package; it is below, from ggml/include/ggml.h of llama.cpp 0c1e57098.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as L

from expertd.errors import EngineError

GGML_TYPE_I32 = 26
_GGML_OBJECT_NBYTES = 32

_MODEL_DEFAULTS = {"n_gpu_layers": -1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True, "no_alloc": False}
_MODEL_PARAMS_NBYTES = 80
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn_type": -1, "type_k": 1, "type_v": 1,
    "defrag_thold": -1.0, "offload_kqv": True, "no_perf": True, "swa_full": True, "kv_unified": False, "n_samplers": 0,
}  # fmt: skip
_CONTEXT_PARAMS_NBYTES = 160


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


@cache
def ggml() -> ctypes.CDLL:
    """libggml with the prototypes used here; its base and CPU libraries resolve through it."""
    lib = ctypes.CDLL(str(library("ggml")))
    lib.ggml_tensor_overhead.restype = ctypes.c_size_t
    lib.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_buffer_is_host.restype = ctypes.c_bool
    lib.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    lib.ggml_backend_tensor_get.restype = None
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    lib.ggml_backend_buft_name.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_buft_name.restype = ctypes.c_char_p
    return lib


def library(name: str) -> Path:
    """The shared library `lib<name>.so` that llama-cpp-python ships."""
    return Path(L.__file__).parent / "lib" / f"lib{name}.so"


def check() -> None:
    """Raises EngineError, naming the first field that is off, when this build's structs are not those known here."""
    for what, params, nbytes, known in (
        ("llama_model_params", L.llama_model_default_params(), _MODEL_PARAMS_NBYTES, _MODEL_DEFAULTS),
        ("llama_context_params", L.llama_context_default_params(), _CONTEXT_PARAMS_NBYTES, _CONTEXT_DEFAULTS),
    ):
        if ctypes.sizeof(params) != nbytes:
            raise _mismatch(what, "size", nbytes, ctypes.sizeof(params))
        for field, value in known.items():
            found: Any = getattr(params, field, None)
            if found != value:
                raise _mismatch(what, field, value, found)
    overhead = ggml().ggml_tensor_overhead() - _GGML_OBJECT_NBYTES
    if overhead != ctypes.sizeof(Tensor):
        raise _mismatch("ggml_tensor", "size", ctypes.sizeof(Tensor), overhead)


def _mismatch(what: str, field: str, expected: object, found: object) -> EngineError:
    return EngineError(
        f"this llama-cpp-python has {what}.{field} = {found!r} where {expected!r} is known",
        hint="install the range that `expertd version` names",
    )


@cache
def buffer_types() -> dict[str, int]:
    """Backend buffer types by name (CPU, CUDA0 ...), as llama.cpp's `--override-tensor` spells them."""
    lib = ggml()
    found: dict[str, int] = {}
    for i in range(lib.ggml_backend_dev_count()):
        buft = lib.ggml_backend_dev_buffer_type(lib.ggml_backend_dev_get(i))
        if buft:
            found.setdefault(lib.ggml_backend_buft_name(buft).decode(), buft)
    return found


def has_gpu() -> bool:
    """Whether this build can put layers anywhere but on the CPU."""
    return bool(L.llama_supports_gpu_offload())
