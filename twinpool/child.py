"""A child process: started, watched, drained, ended.

One life: 1. started in a session of its own, so that a terminal's Ctrl-C reaches only this process; 2. it holds the
reading end of a pipe whose other end dies with this process (see ``parent_watch``); 3. its health is watched over gRPC
until it is ready, and then a sign of life is asked for: one that hangs is killed; 4. when it ends, what is left of its
session is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool.errors import TwinpoolError
from twinpool.parent_watch import PARENT_FD
from twinpool.tls import ClientTls

KEPT_LINES = 20
# Quick, so that readiness is seen within a fraction of a second of its coming.
_HEALTH_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
]


class ChildFailed(TwinpoolError):
    """A child ended before it was ever ready; ``exit_code`` is the child's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep: how it is started and which gRPC service of which address says that it is ready.

    Once ready, a process that answers no health check for ``silence_s`` seconds hangs, and is replaced.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    address: str
    service: str
    drain_s: float
    silence_s: float = 60.0
    tls: ClientTls | None = None


class Child:
    """A process that can be started again and again; belongs to one event loop.

    Args:
        spec: see ``ChildSpec``.
        log: takes (name, line) for every line that it prints.
        report: takes a line about what happened to it.
    """

    def __init__(self, spec: ChildSpec, log: Callable[[str, str], None], report: Callable[[str], None]) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._log = log
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._parent_end: int | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    async def live(self) -> int:
        """One life, from the start to the end of everything in the child's session; returns the exit code.

        Raises:
            ChildFailed: what answers at its address does not serve health.
        """
        process = await self._start()
        health, end = asyncio.create_task(self._watch_health()), asyncio.create_task(process.wait())
        try:
            await asyncio.wait([health, end], return_when=asyncio.FIRST_COMPLETED)
            if health.done():
                health.result()
            code = await end
        finally:
            health.cancel()
            end.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)  # grandchildren may keep the pipe open
        self.kill()
        self._process = None
        return code

    def failure(self, code: int) -> ChildFailed:
        """The error of a child that ended with ``code``, in its own words."""
        return ChildFailed(self.cause(code), code if code > 0 else 1)

    async def _start(self) -> asyncio.subprocess.Process:
        self._last_lines.clear()
        child_end, self._parent_end = os.pipe()
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**self.spec.environment, PARENT_FD: str(child_end)},
                pass_fds=[child_end],
                start_new_session=True,
            )
        )
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting  # else nobody would know the process
            raise
        finally:
            os.close(child_end)
        self._reader = asyncio.create_task(self._read_lines(self._process))
        return self._process

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take_line(line)
        if rest:
            self._take_line(rest)

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._last_lines.append(text)
        self._log(self.spec.name, text)

    async def _watch_health(self) -> None:
        """Sets ``ready`` when the service is SERVING, reports when a restarted child is back, kills one that hangs.

        Raises:
            ChildFailed: what answers does not serve health.
        """
        request = health_pb2.HealthCheckRequest(service=self.spec.service)
        async with self._health_channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    async for response in stub.Watch(request, wait_for_ready=True):
                        if response.status == health_pb2.HealthCheckResponse.SERVING:
                            if self.ready.is_set():
                                self._report(f"{self.spec.name} is ready again")
                            self.ready.set()
                            await self._watch_silence(stub)
                            return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        cause = f"health of {self.spec.name} cannot be watched: {error.details()}"
                        raise ChildFailed(
                            f"{cause}; is another program listening on {self.spec.address}?", 1
                        ) from error
                    await asyncio.sleep(0.2)  # it went away between connect and answer; its end is seen elsewhere

    def _health_channel(self) -> grpc.aio.Channel:
        tls = self.spec.tls
        if tls is None:
            return grpc.aio.insecure_channel(self.spec.address, options=_HEALTH_OPTIONS)
        options = [*_HEALTH_OPTIONS, *tls.options]
        return grpc.aio.secure_channel(self.spec.address, tls.credentials(), options=options)

    async def _watch_silence(self, stub: health_pb2_grpc.HealthStub) -> None:
        """Asks for a sign of life a few times per ``silence_s``; kills the child when none came for so long."""
        pause_s = self.spec.silence_s / 6
        answered = time.monotonic()
        while (now := time.monotonic()) - answered < self.spec.silence_s:
            await asyncio.sleep(pause_s)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=pause_s)
                answered = time.monotonic()
            except grpc.aio.AioRpcError:
                continue  # whether it hangs is a question of time; if it has ended, that is seen elsewhere
        self._report(f"{self.spec.name} has not answered for {now - answered:.0f} s and is killed")
        self.kill()

    def cause(self, code: int) -> str:
        """How a life ended, with the child's last words."""
        errors = [line.removeprefix("error: ") for line in self._last_lines if line.startswith("error: ")]
        if errors and code > 0:
            return errors[-1]
        if code == -signal.SIGKILL:  # what it printed last has nothing to do with it
            return f"{self.spec.name} was killed by SIGKILL (the system does that when memory runs out)"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = next((line for line in reversed(self._last_lines) if line.strip()), "it printed nothing")
        return f"{self.spec.name} {how}: {words}"

    def terminate(self) -> None:
        """Asks the child to drain."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kills whatever is left of the child's session. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._parent_end is not None:
            os.close(self._parent_end)
            self._parent_end = None

    async def ended_within(self, limit_s: float) -> None:
        """Waits for the child's end, at most ``limit_s`` seconds."""
        if self._process is not None:
            waiting = asyncio.ensure_future(self._process.wait())
            await asyncio.wait([waiting], timeout=limit_s)
            waiting.cancel()
