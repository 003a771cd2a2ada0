"""Connections whose other end is gone without a word: no FIN, no RST, no acknowledgement. Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable

SO_ATTACH_FILTER = 26


def vanish(sock: socket.socket) -> None:
    """Has the kernel drop whatever arrives at ``sock``, as if the machine with it were cut off."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop_all)))


class Proxy:
    """Forwards TCP from ``listen`` to ``target`` until ``cut``; has a thread and a loop of its own."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        self._far: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._server = socket.create_server(listen)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(lambda: self._spawn(self._accept()))

    @property
    def outgoing(self) -> list[socket.socket]:
        """The ends of its connections to ``target``."""
        return self._far

    def cut(self) -> None:
        """Both sides of every connection see nothing any more; new ones are accepted and hear nothing."""
        self._call(self._cut)

    def mend(self) -> None:
        """New connections work; those that were cut stay so."""
        self._is_cut = False

    def close(self) -> None:
        def end() -> None:
            for task in self._tasks:
                task.cancel()
            for sock in [self._server, *self._sockets]:
                sock.close()

        self._call(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _cut(self) -> None:
        self._is_cut = True
        for sock in self._sockets:
            if sock.fileno() >= 0:
                vanish(sock)

    def _call(self, work: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def _spawn(self, work: object) -> None:
        task = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._server)
            self._sockets.append(near)
            if self._is_cut:
                vanish(near)
                continue
            far = socket.socket()
            far.setblocking(False)
            self._sockets.append(far)
            self._far.append(far)
            try:
                await self._loop.sock_connect(far, self._target)
            except OSError:
                near.close()
                continue
            self._spawn(self._forward(near, far))
            self._spawn(self._forward(far, near))

    async def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(source, 65536):
                await self._loop.sock_sendall(sink, data)
        if not self._is_cut:
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
