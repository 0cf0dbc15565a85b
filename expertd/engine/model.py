"""A loaded model: its weights (mapped), its vocabulary and what it says of itself. No context, no decoding.

Tokenising and detokenising only read the vocabulary and may be called from any thread.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from llama_cpp import llama_cpp as L

from expertd.engine import abi
from expertd.engine.lazy_load import lazy_load
from expertd.engine.settings import EngineSettings
from expertd.errors import EngineError, UsageError

log = logging.getLogger("expertd.engine")
_llama_log = logging.getLogger("expertd.llama")
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""enum ggml_log_level, whose INFO is our DEBUG: it prints hundreds of lines a load."""
_CONTINUED = 5
_CANCELLED = (
    "failed to compute graph, compute status: 1",
    "ggml_backend_sched_graph_compute_async failed with error 1",
    "failed to decode, ret = 2",
)
"""How llama.cpp reports a decode that was cancelled: as an error, which it is not here."""
_UNDOING = "decode: removing memory module entries"
"""What it says while it undoes any decode that did not end."""
_log_lock = threading.Lock()
_log_state: dict[str, Any] = {"level": logging.DEBUG, "line": "", "last_error": "", "sink": None}


@L.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user: object) -> None:
    """llama.cpp's log, line by line, into ours."""
    with _log_lock:
        if level != _CONTINUED:
            _log_state["level"] = _LEVELS.get(level, logging.DEBUG)
        _log_state["line"] += text.decode("utf-8", "replace")
        if not _log_state["line"].endswith("\n"):
            return
        line, _log_state["line"] = _log_state["line"].rstrip("\n"), ""
        number = _log_state["level"]
        if number >= logging.ERROR and line:
            _log_state["last_error"] = line
        sink = _log_state["sink"]
    if line.endswith(_CANCELLED) or line.startswith(_UNDOING):
        number = logging.DEBUG
    if sink is not None:
        sink(line)
    if line:
        _llama_log.log(number, "%s", line)


@contextmanager
def captured_log(sink: Callable[[str], None]) -> Iterator[None]:
    """Also hands every line of llama.cpp's log to `sink` while the context holds."""
    _log_state["sink"] = sink
    try:
        yield
    finally:
        _log_state["sink"] = None


def start_backend() -> None:
    """Checks the binary interface and routes llama.cpp's log into ours. Raises EngineError. Safe to call again."""
    L.llama_log_set(_on_log, None)
    abi.check()
    L.llama_backend_init()


class LoadedModel:
    """Weights and vocabulary. `close` frees them; contexts must be closed before."""

    def __init__(self, settings: EngineSettings, progress: Callable[[float], None] | None = None) -> None:
        """Loads. Raises EngineError with llama.cpp's own last words when it cannot.

        `progress` is called with 0.0 to 1.0 from the loading thread.
        """
        self.settings = settings
        self.load_seconds = 0.0
        self.notes: list[str] = []
        self._keep: list[Any] = []
        params = self._params(progress)
        _log_state["last_error"] = ""
        began = time.perf_counter()
        with lazy_load(abi.library("llama"), enabled=settings.lazy_load and not settings.repack) as lazy:
            self._model = L.llama_model_load_from_file(str(settings.model).encode(), params)
        self.load_seconds = time.perf_counter() - began
        self.lazy = lazy
        if not self._model:
            why = _log_state["last_error"] or "no reason was logged"
            raise EngineError(
                f"{settings.model}: llama.cpp cannot load the model: {why}",
                hint="try `expertd inspect`; a newer llama-cpp-python may know this architecture",
            )
        if settings.lazy_load and not settings.repack and not lazy.active:
            self.notes.append(f"the load reads the whole file: {lazy.reason}")
        self.vocab = L.llama_model_get_vocab(self._model)
        self.n_vocab: int = L.llama_vocab_n_tokens(self.vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def handle(self) -> Any:
        return self._model

    def close(self) -> None:
        if self._model:
            L.llama_model_free(self._model)
            self._model = None

    def _params(self, progress: Callable[[float], None] | None) -> Any:
        s = self.settings
        params = L.llama_model_default_params()
        params.load_mode = L.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = s.repack
        params.n_gpu_layers = s.n_gpu_layers
        overrides = buffer_overrides(s)
        if overrides:
            array = _override_array(overrides)
            self._keep.append(array)
            params.tensor_buft_overrides = ctypes.cast(array, ctypes.c_void_p)
        if not abi.has_gpu():
            self.notes += without_effect(s)
        if progress is not None:

            def report(value: float, _user: object) -> bool:
                progress(value)
                return True

            callback = L.llama_progress_callback(report)
            self._keep.append(callback)
            params.progress_callback = callback
        return params

    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        L.llama_model_desc(self._model, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_params(self) -> int:
        return int(L.llama_model_n_params(self._model))

    @property
    def nbytes(self) -> int:
        return int(L.llama_model_size(self._model))

    @property
    def n_ctx_train(self) -> int:
        return int(L.llama_model_n_ctx_train(self._model))

    @property
    def n_swa(self) -> int:
        """Width of the sliding attention window in tokens; 0 when there is none."""
        return int(L.llama_model_n_swa(self._model))

    @property
    def recurrent(self) -> bool:
        """Whether a sequence's state cannot be cut back to an earlier token (recurrent and hybrid models)."""
        return bool(L.llama_model_is_recurrent(self._model) or L.llama_model_is_hybrid(self._model))

    def chat_template(self) -> str | None:
        text = L.llama_model_chat_template(self._model, None)
        return text.decode("utf-8", "replace") if text else None

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, EOT, EOM)."""
        return bool(L.llama_vocab_is_eog(self.vocab, token))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return tuple(token for token in range(self.n_vocab) if self.is_end(token))

    def token_text(self, kind: str) -> str:
        """The text of the `bos` or `eos` token, empty when there is none."""
        token = L.llama_vocab_bos(self.vocab) if kind == "bos" else L.llama_vocab_eos(self.vocab)
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def adds_bos(self) -> bool:
        return bool(L.llama_vocab_get_add_bos(self.vocab))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids. `parse_special` turns the spelling of control tokens into those tokens."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 2
        while True:
            tokens = (L.llama_token * room)()
            n = L.llama_tokenize(self.vocab, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return list(tokens[:n])
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; control tokens give none unless `special`. Cached."""
        key = (token, special)
        found = self._pieces.get(key)
        if found is None:
            buffer = ctypes.create_string_buffer(256)
            n = L.llama_token_to_piece(self.vocab, token, buffer, 256, 0, special)
            if n < 0:
                buffer = ctypes.create_string_buffer(-n)
                n = L.llama_token_to_piece(self.vocab, token, buffer, -n, 0, special)
            found = self._pieces[key] = buffer.raw[: max(n, 0)]
        return found

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of a series of tokens. Raises UsageError for an id outside of the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise UsageError(f"token {token} is not in the vocabulary of {self.n_vocab}")
        return b"".join(self.piece(token, special=special) for token in tokens)


_EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_BUFFER_RULE = re.compile(r"(.+)=([^=]+)")


def buffer_overrides(settings: EngineSettings) -> list[tuple[str, int]]:
    """(pattern, buffer type) in matching order: the user's rules first, then those of `n_cpu_moe`.

    Raises UsageError for a rule that is not pattern=buffer or names a buffer this build does not have.
    """
    known = abi.buffer_types()
    rules = []
    for rule in settings.override_tensor:
        found = _BUFFER_RULE.fullmatch(rule)
        if found is None:
            raise UsageError(f"override_tensor {rule!r} is not pattern=buffer", hint="for example: exps=CPU")
        if found[2] not in known:
            raise UsageError(
                f"override_tensor {rule!r}: there is no buffer {found[2]!r}", hint=f"this build has {', '.join(known)}"
            )
        rules.append((found[1], known[found[2]]))
    rules += [(rf"blk\.{layer}{_EXPERT_TENSORS}", known["CPU"]) for layer in range(settings.n_cpu_moe)]
    return rules


def without_effect(settings: EngineSettings) -> list[str]:
    """A sentence for each GPU setting that a build without a GPU cannot follow."""
    notes = []
    if settings.n_gpu_layers:
        notes.append(f"n_gpu_layers = {settings.n_gpu_layers} has no effect: this llama.cpp build has no GPU backend")
    if settings.n_cpu_moe:
        notes.append(f"n_cpu_moe = {settings.n_cpu_moe} has no effect: all layers are on the CPU in this build")
    if settings.override_tensor:
        notes.append("override_tensor has no effect beyond the CPU: this llama.cpp build has no GPU backend")
    return notes


class _BufferOverride(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _override_array(rules: list[tuple[str, int]]) -> Any:
    """The NULL-terminated array of struct llama_model_tensor_buft_override."""
    array = (_BufferOverride * (len(rules) + 1))()
    for i, (pattern, buft) in enumerate(rules):
        array[i] = _BufferOverride(pattern.encode(), buft)
    return array
