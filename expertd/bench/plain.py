"""The arm to compare with: llama.cpp through llama-cpp-python's own calls, with none of expertd's steering.

As a user would run it: mmap with its stock load, a warm context, greedy sampling. Of expertd only the pinned structs
and, where routes are forced, the tap are in use, since forcing needs one in every arm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from llama_cpp import llama_cpp as L

from expertd.bench import meter
from expertd.bench.forcing import ForcedRoutes
from expertd.bench.meter import Reading
from expertd.bench.spec import Cache, Kind, RunSpec
from expertd.engine.tap import RouterTap
from expertd.errors import BenchError
from expertd.types import Phase

_BATCH = 512
"""llama-cpp-python's own default, for n_batch and n_ubatch."""


def _unheard(layer: int, ids: Sequence[int], phase: Phase) -> None:
    """Receives the routes where nobody wants them."""


class PlainArm:
    """Owned by the one thread that runs an arm. `start` loads, `close` frees."""

    def __init__(self, spec: RunSpec, forced: ForcedRoutes | None) -> None:
        self._spec, self._forced = spec, forced
        self._model: Any = None
        self._ctx: Any = None
        self._sampler: Any = None
        self._tap: RouterTap | None = None
        self._biases: Any = None
        self._n_batch = _BATCH

    @property
    def repacked(self) -> bool:
        return self._spec.arm.kind is Kind.REPACKED

    def start(self) -> Reading:
        """Loads the model and makes the context. Returns the cost of the load alone. Raises BenchError."""
        L.llama_backend_init()
        params = L.llama_model_default_params()
        params.load_mode = L.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = self.repacked
        params.n_gpu_layers = 0
        before = meter.read()
        self._model = L.llama_model_load_from_file(self._spec.model.encode(), params)
        cost = meter.read().since(before)
        if not self._model:
            raise BenchError(f"llama.cpp cannot load {self._spec.model}")
        self._vocab = L.llama_model_get_vocab(self._model)
        self._ctx = L.llama_init_from_model(self._model, self._context_params())
        if not self._ctx:
            raise BenchError(f"llama.cpp cannot make a context of {self._spec.n_ctx} tokens")
        self._sampler = self._greedy()
        return cost

    def _context_params(self) -> Any:
        spec = self._spec
        params = L.llama_context_default_params()
        params.n_ctx = spec.n_ctx
        params.n_ubatch = spec.n_ubatch or _BATCH
        params.n_batch = self._n_batch = max(spec.n_batch or _BATCH, params.n_ubatch)
        params.n_threads = params.n_threads_batch = spec.threads
        params.swa_full = False
        if self._forced is not None:
            self._tap = RouterTap(_unheard, (), enabled=False, rewrite=self._forced.rewrite)
            params.cb_eval = self._tap.callback
        return params

    def _greedy(self) -> Any:
        """Greedy, but never an end token: all arms answer at the same length."""
        n = L.llama_vocab_n_tokens(self._vocab)
        never = [(t, float("-inf")) for t in range(n) if L.llama_vocab_is_eog(self._vocab, t)]
        self._biases = (L.llama_logit_bias * len(never))(*never)
        chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
        L.llama_sampler_chain_add(chain, L.llama_sampler_init_logit_bias(n, len(never), self._biases))
        L.llama_sampler_chain_add(chain, L.llama_sampler_init_greedy())
        return chain

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        tokens = (L.llama_token * room)()
        n = L.llama_tokenize(self._vocab, data, len(data), tokens, room, True, False)
        return list(tokens[:n])

    def generate(self, prompt: Sequence[int], n: int) -> Iterator[int]:
        """`n` tokens after `prompt`, each as soon as it is sampled. Raises BenchError when llama.cpp fails."""
        L.llama_memory_clear(L.llama_get_memory(self._ctx), False)
        step = self._n_batch
        for start in range(0, len(prompt), step):
            self._decode(prompt[start : start + step])
        for i in range(n):
            token: int = L.llama_sampler_sample(self._sampler, self._ctx, -1)
            yield token
            if i + 1 < n:
                self._decode([token])

    def _decode(self, tokens: Sequence[int]) -> None:
        array = (L.llama_token * len(tokens))(*tokens)
        code = L.llama_decode(self._ctx, L.llama_batch_get_one(array, len(tokens)))
        if code:
            raise BenchError(f"llama.cpp failed to decode (code {code})")

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say."""
        parts = []
        buffer = ctypes.create_string_buffer(256)
        for token in tokens:
            n = L.llama_token_to_piece(self._vocab, token, buffer, 256, 0, True)
            parts.append(buffer.raw[: max(n, 0)])
        return b"".join(parts).decode("utf-8", "replace")

    def logits(self) -> bytes:
        """The bits of the logits that the last token was drawn from."""
        n = L.llama_vocab_n_tokens(self._vocab)
        return ctypes.string_at(L.llama_get_logits_ith(self._ctx, -1), 4 * n)

    def cache(self) -> Cache | None:
        """There is none to count."""
        return None

    def close(self) -> None:
        if self._sampler:
            L.llama_sampler_free(self._sampler)
        if self._ctx:
            L.llama_free(self._ctx)
        if self._model:
            L.llama_model_free(self._model)
        self._sampler = self._ctx = self._model = None
