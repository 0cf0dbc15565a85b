"""A daemon's life on one event loop, top to bottom.

1. Bind the port and the socket: a second start is refused by name before anything is loaded.
2. Start to load in the engine thread, and answer HTTP meanwhile (503 until ready).
3. Tell systemd of progress; READY once the model is loaded and as warm as asked for.
4. Live: watchdog, verdict, SIGHUP, until SIGTERM, SIGINT or a failure.
5. Stop: no new requests, running ones end or are told, the model is freed, the sockets go.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import uvloop

from expertd.config import Config
from expertd.daemon.facts import snapshot
from expertd.daemon.reload import apply
from expertd.daemon.settings import runtime_settings, server_settings
from expertd.errors import EXIT_FAILED, EXIT_OK, ExpertdError
from expertd.pages import disk
from expertd.runtime.service import Service
from expertd.server.app import create_app
from expertd.server.run import HttpServer
from expertd.telemetry.collector import ExpertdCollector, Exporter
from expertd.telemetry.history import History
from expertd.telemetry.notify import Notifier, keep_alive
from expertd.telemetry.snapshot import Snapshot
from expertd.telemetry.watch import TICK_SECONDS, Watch, measure_disk

log = logging.getLogger("expertd.daemon")

_SWITCH_SECONDS = 0.0005
"""Python hands the GIL over at least this often. The engine thread takes it thousands of times a token; the default of
5 ms would let a busy event loop hold each of them up for as long."""


_DESCRIPTORS = 65_536
"""As in the unit. A shell's soft limit is often 1,024, which as many connections would use up."""


def run(config: Config, reload: Callable[[], Config]) -> int:
    """Runs the daemon; returns its exit code."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    _allow_descriptors()
    # A crash inside llama.cpp is over before anything can be logged: at least what ran is said.
    faulthandler.enable(all_threads=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        daemon = Daemon(config, reload)
        code = runner.run(daemon.live())
        if daemon.abandoned:
            # The interpreter would wait for threads that a disk holds, and free what the engine still computes with.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(code)
        return code


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Daemon:
    """One life. Lives on the event loop."""

    def __init__(self, config: Config, reload: Callable[[], Config]) -> None:
        self._config, self._reload = config, reload
        self._service = Service(runtime_settings(config))
        self._watch = Watch(self._facts, read_ahead_kb=self._read_ahead_kb)
        self._history = History()
        exporter = Exporter(ExpertdCollector(self._facts, lambda: self._watch.verdict))
        settings = server_settings(config)
        self._app = create_app(self._service, settings, exporter.render, self._status, self._series)
        self._http = HttpServer(self._app, settings)
        self._notify = Notifier()
        self._stop = asyncio.Event()
        self._device: int | None = None
        """Number of the model's device. Asked for once, in a thread: a stat waits for a disk that hangs."""
        self.abandoned = False
        """Whether the engine's thread was left behind at the end."""

    async def live(self) -> int:
        """The whole of it. Raises ExpertdError for what stops the start."""
        self._http.bind()  # 1
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        serving = asyncio.create_task(self._http.serve())  # 2
        self._service.start()
        tasks = [asyncio.create_task(work) for work in (self._tell_progress(), self._tick(), self._keep_alive())]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)  # 4
            if serving.done():
                serving.result()
        finally:
            await self._end(serving, tasks)
            stopping.cancel()
        return EXIT_FAILED if self._service.failure else EXIT_OK

    async def _end(self, serving: asyncio.Task[None], tasks: list[asyncio.Task[None]]) -> None:
        """Case 5."""
        self._notify.stopping(self._service.failure or "Stopping")
        began = time.monotonic()
        self._http.stop()
        await asyncio.wait({serving})
        stopped = await self._service.stop(max(1.0, self._config.server.drain_seconds))
        for task in tasks:
            task.cancel()
        await asyncio.wait(set(tasks))
        self.abandoned = not stopped
        if not stopped:
            log.warning("the engine did not end in time; the process ends without freeing the model")
        log.info("stopped in %.1f s", time.monotonic() - began)

    async def _keep_alive(self) -> None:
        """Should the end of a daemon whose engine hangs hang as well, the watchdog ends it."""
        await keep_alive(self._notify, lambda: not self._service.hung)

    def _on_stop_signal(self, number: int) -> None:
        log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()

    def _on_reload(self) -> None:
        self._notify.reloading()
        try:
            new = self._reload()
            apply(self._config, new, self._service, self._app)
            self._config = new
        except ExpertdError as error:
            log.error("reload: %s; nothing was changed", error.line())
        self._notify.ready(self._words())

    async def _tell_progress(self) -> None:
        """Case 3. Ends the daemon when the model cannot be served."""
        while self._service.state in ("loading", "warming"):
            self._notify.status(self._words())
            # One that stands still is ended by the service itself (`runtime.hang`).
            self._notify.extend_timeout(60)
            try:
                await asyncio.wait_for(self._service.wait_changed(), 1.0)
            except TimeoutError:
                continue
        if self._service.state == "failed":
            self._stop.set()
            return
        # What is alive now stays for the process's life: later collections need not look at it again.
        gc.collect()
        gc.freeze()
        log.info("ready: %s at %s", self._service.model.id if self._service.model else "", self._http.url)
        self._notify.ready(self._words())
        looking = asyncio.create_task(self._look_at_disk())
        while True:
            state = await self._service.wait_changed()
            if state == "failed":
                looking.cancel()
                self._stop.set()
                return

    async def _look_at_disk(self) -> None:
        model = self._service.settings.engine.model
        with contextlib.suppress(OSError):
            self._device = (await asyncio.to_thread(os.stat, model)).st_dev
        self._watch.disk_rate = await asyncio.to_thread(measure_disk, model)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._watch.tick(time.monotonic())
            if self._watch.latest is not None:
                self._history.add(self._watch.latest)
            if self._service.state == "ready":
                self._notify.status(self._words())

    def _read_ahead_kb(self) -> int | None:
        if self._device is None:
            return None
        limits = disk.device_limits(self._device)
        return limits.read_ahead_kb if limits.known else None

    def _facts(self) -> Snapshot:
        return snapshot(self._service, self._app.state.context.counts)

    def _status(self) -> dict[str, object]:
        session = self._service.session
        return {**self._judgement(), "notes": list(session.notes) if session else []}

    def _series(self, since: int | None) -> dict[str, object]:
        return {**self._judgement(), **self._history.document(since)}

    def _judgement(self) -> dict[str, object]:
        """The verdict now, and the last one that was reached while there was work."""
        busy = self._watch.last_busy
        return {"verdict": asdict(self._watch.verdict), "last_busy": asdict(busy) if busy else None}

    def _words(self) -> str:
        """One line for `systemctl status`."""
        service, progress = self._service, self._service.progress
        if service.state in ("loading", "warming") and progress.total:
            return f"{service.state}: {progress.what} {100 * progress.done // progress.total} %"
        if service.state == "warming" and progress.what == "rehearsal":
            return "warm, waiting for a rehearsal: `expertd rehearse`"
        if service.state != "ready":
            return service.state
        report = service.cache_report()
        if not report["steering"]:
            return "ready, not steering"
        return f"ready, {100 * report['hit_ratio']:.1f} % hits, {self._watch.verdict.cause}"
