"""One llama.cpp context with one sequence: decode tokens at a position, cut back, save and restore, stop within a node.

One thread calls it, but for `cancel`, which any thread may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as L

from expertd.engine.model import LoadedModel
from expertd.engine.settings import FLASH_ATTENTION, KV_TYPES, EngineSettings, physical_cores
from expertd.engine.tap import RouterTap
from expertd.errors import EngineError, ExpertdError
from expertd.types import Phase

DEFAULT_UBATCH = 512
_SEQ = 0
_ABORTED = 2


class Cancelled(ExpertdError):
    """The decode was cancelled from another thread."""

    code = "cancelled"


class Context:
    """A KV cache of `n_ctx` tokens for one running conversation, and the compute buffers."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, tap: RouterTap | None) -> None:
        """Raises EngineError when llama.cpp cannot allocate it."""
        self.model, self._tap = model, tap
        # llama.cpp asks an abort callback before each graph node. A Python callback would take the GIL thousands of
        # times a token; libc's strlen on a two-byte buffer is a native function that says "true" once the first byte
        # is set, so a cancel costs nothing until it comes.
        self._abort_flag = ctypes.create_string_buffer(2)
        params = self._params(settings)
        self._ctx = L.llama_init_from_model(model.handle, params)
        if not self._ctx:
            raise EngineError(
                f"llama.cpp cannot allocate a context of {settings.n_ctx} tokens",
                hint="lower n_ctx or n_ubatch, or use a q8_0 KV cache",
            )
        self._memory = L.llama_get_memory(self._ctx)
        self.n_ctx: int = L.llama_n_ctx(self._ctx)
        self.n_batch: int = L.llama_n_batch(self._ctx)
        self.n_ubatch: int = L.llama_n_ubatch(self._ctx)
        self._batch = L.llama_batch_init(self.n_batch, 0, 1)
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = _SEQ
            self._batch.logits[i] = 0
        self._token_array = ctypes.cast(self._batch.token, ctypes.POINTER(ctypes.c_int32 * self.n_batch)).contents
        self._pos_array = ctypes.cast(self._batch.pos, ctypes.POINTER(ctypes.c_int32 * self.n_batch)).contents

    def _params(self, s: EngineSettings) -> Any:
        params = L.llama_context_default_params()
        params.n_ctx = s.n_ctx
        params.n_ubatch = min(s.n_ubatch or DEFAULT_UBATCH, s.n_ctx)
        params.n_batch = max(min(s.n_batch or params.n_ubatch, s.n_ctx), params.n_ubatch)
        params.n_threads = s.threads or physical_cores()
        params.n_threads_batch = s.threads_batch or params.n_threads
        params.type_k = params.type_v = KV_TYPES[s.kv_type]
        params.flash_attn_type = FLASH_ATTENTION[s.flash_attention]
        params.swa_full = False
        # Only the last token of a batch is sampled from. Room for the logits of all would be 300 MB for a vocabulary of
        # 150,000 and a micro-batch of 512.
        params.n_outputs_max = 1
        abort = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        params.abort_callback = ctypes.cast(abort, L.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        if self._tap is not None:
            params.cb_eval = self._tap.callback
        return params

    @property
    def handle(self) -> Any:
        return self._ctx

    def close(self) -> None:
        """Frees the context. Must come before the model's close and from the thread that decodes."""
        if self._ctx:
            L.llama_batch_free(self._batch)
            L.llama_free(self._ctx)
            self._ctx = None

    def cancel(self) -> None:
        """Stops the decode that runs now, or the next one, before its next graph node. From any thread."""
        self._abort_flag[0] = b"\x01"

    def clear_cancel(self) -> None:
        self._abort_flag[0] = b"\x00"

    def decode(self, tokens: Sequence[int], position: int, phase: Phase, *, logits: bool) -> None:
        """Computes at most `n_batch` tokens at `position`; `logits` asks for those of the last one.

        Raises Cancelled, or EngineError when there is no room in the KV cache or llama.cpp fails; the caller then cuts
        the sequence back with `keep`, since tokens of earlier micro-batches may be in it.
        """
        n = len(tokens)
        batch = self._batch
        self._token_array[:n] = tokens
        self._pos_array[:n] = range(position, position + n)
        batch.n_tokens = n
        batch.logits[n - 1] = 1 if logits else 0
        if self._tap is not None:
            self._tap.phase = phase
        result = L.llama_decode(self._ctx, batch)
        batch.logits[n - 1] = 0
        if result == 0:
            if logits:
                L.llama_synchronize(self._ctx)
            return
        if result == _ABORTED:
            raise Cancelled("the request was cancelled")
        if result == 1:
            raise EngineError("the KV cache has no room left", hint="start with a larger n_ctx")
        raise EngineError(f"llama.cpp failed to decode (code {result})", hint="see the log for llama.cpp's own message")

    def logits(self) -> npt.NDArray[np.float32]:
        """The last logits, shape [n_vocab]; a view that the next decode overwrites."""
        pointer = L.llama_get_logits_ith(self._ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def keep(self, n_tokens: int) -> int:
        """Cuts the sequence back to its first `n_tokens`. Returns how many are kept: 0 where llama.cpp cannot cut
        (recurrent state) or a sliding window has already dropped what the cut would need."""
        if n_tokens > 0 and self._can_cut(n_tokens) and L.llama_memory_seq_rm(self._memory, _SEQ, n_tokens, -1):
            return n_tokens
        L.llama_memory_clear(self._memory, False)
        return 0

    def _can_cut(self, n_tokens: int) -> bool:
        """A window cache must still hold the `n_swa` tokens before the cut (llama-server's rule for its own reuse)."""
        window = self.model.n_swa
        if not window:
            return True
        oldest: int = L.llama_memory_seq_pos_min(self._memory, _SEQ)
        return oldest <= max(0, n_tokens - window)

    def save(self) -> bytes:
        """The sequence's whole state."""
        size = L.llama_state_seq_get_size(self._ctx, _SEQ)
        buffer = (ctypes.c_uint8 * size)()
        written = L.llama_state_seq_get_data(self._ctx, buffer, size, _SEQ)
        return bytes(memoryview(buffer)[:written])

    def state_nbytes(self) -> int:
        return int(L.llama_state_seq_get_size(self._ctx, _SEQ))

    def restore(self, state: bytes) -> bool:
        """Replaces the sequence by a saved one. False, with the sequence empty, when llama.cpp refuses it."""
        L.llama_memory_clear(self._memory, False)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if L.llama_state_seq_set_data(self._ctx, buffer, len(state), _SEQ):
            return True
        L.llama_memory_clear(self._memory, False)
        return False
