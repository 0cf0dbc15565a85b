"""Recording the routes of a running daemon: off until somebody starts it, bounded, and never in a token's way.

The engine thread packs a record and appends it to a queue; a thread of its own writes a block a second. At the bound,
or when the disk refuses, recording stops and says why. While it records, the tap looks at every layer of every token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertd.errors import StateError
from expertd.runtime.profile import Shape
from expertd.runtime.steering import Steering
from expertd.runtime.trace_file import TraceWriter, make_room, pack
from expertd.types import Phase
from expertd.units import format_size

log = logging.getLogger("expertd.trace")

_SECONDS = 1.0
_MAX_WAITING = 200_000


class Tracing:
    """Of one session. `observe` is the engine thread's; the rest anybody's."""

    def __init__(self, steering: Steering, shape: Shape, path: Path | None, max_bytes: int) -> None:
        self._steering, self._shape = steering, shape
        self.path, self.max_bytes = path, max_bytes
        self._queue: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._writer: TraceWriter | None = None
        self._step = self._last_layer = -1
        self._width = 1
        """Tokens of the step at hand: more than one in a prompt's batch."""
        self.routes = self.dropped = self.nbytes = 0
        self.stopped = "not started"

    @property
    def on(self) -> bool:
        return self._writer is not None

    def observe(self, layer: int, ids: Sequence[int], phase: Phase) -> None:
        """A route, packed and queued."""
        if self._writer is None:
            return
        if layer <= self._last_layer:
            self._step += self._width
            self._width = max(1, len(ids) // self._shape.n_used)
        self._last_layer = layer
        if len(self._queue) >= _MAX_WAITING:
            self.dropped += 1
            return
        self._queue.append(pack(self._step, layer, phase, ids))
        self.routes += 1

    def start(self, max_bytes: int | None = None) -> dict[str, Any]:
        """Begins a new file in the place of an older one. StateError while recording, and when it cannot be written."""
        with self._lock:
            if self.on:
                raise StateError("routes are recorded already", hint="stop it first")
            if self.path is None:
                raise StateError("there is no state directory to record into", hint="set trace.path")
            layout, shape = self._steering.layout, self._shape
            header = {
                "model": shape.model, "fingerprint": shape.fingerprint, "layers": shape.n_layers,
                "experts": shape.n_experts, "experts_used": shape.n_used, "started": time.time(),
                "expert_bytes": {str(m.layer): m.expert_nbytes for m in layout.layers},
            }  # fmt: skip
            if (aside := make_room(self.path)) is not None:
                log.warning("%s was written by a newer expertd: set aside as %s", self.path, aside.name)
            self.max_bytes = max_bytes or self.max_bytes
            self._queue.clear()
            self._step, self._width, self._last_layer, self.routes, self.dropped = -1, 1, layout.n_layers, 0, 0
            try:
                writer = TraceWriter(self.path, header)
            except OSError as error:
                raise StateError(f"{self.path}: cannot be written: {error.strerror}") from error
            self._end.clear()
            self.stopped, self.nbytes, self._writer = "", writer.nbytes, writer
            self._thread = threading.Thread(target=self._run, args=(writer,), name="expertd-trace", daemon=True)
            self._steering.observers.append(self.observe)
            self._steering.look_at_all = True
            self._thread.start()
        log.warning("routes are recorded into %s: which experts a text used tells something of the text", self.path)
        return self.status()

    def stop(self, why: str = "as asked") -> dict[str, Any]:
        """Writes what waits and ends. Nothing happens when nothing is recorded."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._end.set()
        if thread is not None:
            thread.join(10.0)
            self.stopped = self.stopped or why
        return self.status()

    def _run(self, writer: TraceWriter) -> None:
        why = ""
        while not why and not self._end.wait(_SECONDS):
            why = self._drain(writer)
        self._steering.look_at_all = False
        self._steering.observers.remove(self.observe)
        self._writer = None
        why = why or self._drain(writer)
        writer.close()
        self.stopped = why
        if why:
            log.warning("recording of routes ended: %s", why)

    def _drain(self, writer: TraceWriter) -> str:
        """Writes one block of what waits; why recording must end, or nothing."""
        records = [self._queue.popleft() for _ in range(len(self._queue))]
        if not records:
            return ""
        payload = b"".join(records)
        if writer.nbytes + len(payload) > self.max_bytes:
            return f"the file has reached its bound of {format_size(self.max_bytes)}"
        try:
            writer.block(payload)
        except OSError as error:
            return f"the disk refuses: {error.strerror}"
        self.nbytes = writer.nbytes
        return ""

    def status(self) -> dict[str, Any]:
        return {
            "recording": self.on, "path": str(self.path or ""), "routes": self.routes, "dropped": self.dropped,
            "bytes": self.nbytes, "max_bytes": self.max_bytes, "stopped": self.stopped,
        }  # fmt: skip
