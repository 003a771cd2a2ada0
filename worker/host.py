"""The frame around a worker: threads, servers, signals, draining.

Life cycle of the process:

1. The role's main loads the model and makes its worker object; the frame starts the engine thread, the transfer thread
   and the servers. Ready is said through health once a self-transfer has worked (see ``startup``), and alive
   under the empty name for as long as the engine steps (see ``heartbeat``).
2. SIGTERM or SIGINT drains: health turns NOT_SERVING, routers hear of it and send no more, running attempts get
   ``drain_timeout_s``. What is left then is handed over: its attempts fail with DRAINING and the router continues
   them elsewhere. Promised KV is served until it is released, for as long as a read may take. A second signal skips
   the waiting.
3. Servers stop (routers see their sessions end), then the engine, the grammar threads, the transfer thread, and the
   connector.

A thread that dies of an unexpected error ends the process with exit code 1: a supervisor restarts it, and sessions
tell everybody else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from typing import Protocol

from twinpool.engine.core import Engine
from twinpool.engine.grammar import LLGuidanceGrammars
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.rpc import RpcServer
from twinpool.worker.cores import pin_thread
from twinpool.worker.draining import Draining
from twinpool.worker.heartbeat import watch_engine

log = logging.getLogger(__name__)


class Drainable(Protocol):
    """What the frame needs to know of a role while it drains."""

    @property
    def draining(self) -> Draining:
        """Whether it refuses new attempts."""

    def hand_over(self) -> None:
        """Ends unfinished attempts with DRAINING, so that their routers continue them elsewhere."""

    @property
    def busy(self) -> bool:
        """Whether an attempt is unfinished."""

    @property
    def promised(self) -> bool:
        """Whether KV is promised to somebody."""


class Host:
    """Owns the threads and servers of one worker process; see the module's life cycle."""

    def __init__(
        self,
        engine: Engine,
        grammars: LLGuidanceGrammars,
        transfer: TransferThread,
        close: Callable[[], None],
        cores: frozenset[int],
    ) -> None:
        """``cores`` are those of the engine thread."""
        self._engine = engine
        self._grammars = grammars
        self._transfer = transfer
        self._close = close
        self._cores = cores
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = 0
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    def fail(self, error: BaseException) -> None:
        """A thread died of ``error``: ends the process. Any thread."""
        log.critical("a worker thread failed, the process ends", exc_info=error)
        self._loop.call_soon_threadsafe(self._fail_on_loop)

    def _fail_on_loop(self) -> None:
        self._exit_code = 1
        self._hurry.set()
        self._stop.set()

    def _run_engine(self) -> None:
        try:
            pin_thread(self._cores)
            self._engine.run()
        except BaseException as error:
            self.fail(error)
            raise

    def start(self) -> None:
        """Starts the threads and takes the signals."""
        self._transfer.start()
        self._engine_thread.start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def serve(
        self, role: Drainable, servers: list[tuple[RpcServer, str]], drain_timeout_s: float, promise_timeout_s: float
    ) -> int:
        """Serves until a signal or a failure, drains, stops everything; returns the exit code."""
        for server, service in servers:
            await server.set_serving(service, True)

        async def set_alive(alive: bool) -> None:
            for server, _ in servers:
                await server.set_serving("", alive)

        heartbeat = asyncio.create_task(watch_engine(self._engine, set_alive))
        await self._stop.wait()
        heartbeat.cancel()
        log.info("draining")
        role.draining.end()
        for server, service in servers:
            await server.set_serving(service, False)
        await self._until(lambda: role.draining.refuses and not role.busy, drain_timeout_s)
        if role.busy and self._exit_code == 0:  # after a failure the sessions break, which counts as a crash
            log.info("handing unfinished attempts over")
            role.hand_over()
        await self._until(lambda: not role.promised, promise_timeout_s)
        # Queued outputs leave with the sessions: open streams get a moment to flush.
        for server, _ in servers:
            await server.stop(0.2)
        await asyncio.to_thread(self._join)
        return self._exit_code

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Waits for ``condition``, looking a few times a second: draining is rare and its end is nobody's event."""
        deadline = self._loop.time() + timeout_s
        while not condition() and not self._hurry.is_set() and self._loop.time() < deadline:
            try:
                await asyncio.wait_for(self._hurry.wait(), 0.1)
            except TimeoutError:
                continue

    def _join(self) -> None:
        self._engine.stop()
        self._engine_thread.join(30)
        self._grammars.close()
        self._transfer.stop()
        self._close()
