"""uvicorn inside the router's loop, with bounds on connections that do not speak.

A connection's life:

1. It must bring the whole head of a request within ``opening_s``, the first one as well as each one that has begun;
   else it is closed. Of those that have not, the oldest gives way once there are ``MAX_OPENING``.
2. While a request is served the kernel watches the client, by keepalive probes and by what is not acknowledged: HTTP
   itself has no sign of life. A client that is gone ends the connection, which cancels the request.
3. Between two requests uvicorn closes it after ``IDLE_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from twinpool.errors import ConfigError
from twinpool.rpc import Keepalive
from twinpool.tls import ServerTls

IDLE_S = 75
MAX_OPENING = 1000
"""Connections that have not sent a request: more than honest clients have on the way, fewer than open files allow."""
_PROBES = 3


class HttpServer:
    """Binds at once, serves from ``start`` to ``stop``."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: ServerTls | None, keepalive: Keepalive) -> None:
        """Binds ``host:port``; 0 picks a free port.

        Raises:
            ConfigError: the address cannot be bound, or a TLS file is missing or wrong.
        """
        context = None if tls is None else tls.http_context()
        self._socket = _listener(host, port, keepalive)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=2,
        )
        settings.load()
        settings.ssl = context  # its own context would not follow the files
        opening: dict[_Connection, None] = {}
        settings.http_protocol_class = partial(_Connection, opening, keepalive.opening_s)  # type: ignore[assignment]
        self._server = _Server(settings)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serves in a task of its own."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Stops accepting, closes connections. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def _listener(host: str, port: int, keepalive: Keepalive) -> socket.socket:
    """A bound socket whose options all accepted ones inherit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; else every answer that is more than one
    # packet, and every event of a stream, may wait 40 ms for the client's delayed acknowledgement.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", math.ceil(keepalive.time_s)),
        ("TCP_KEEPINTVL", math.ceil(keepalive.timeout_s / _PROBES)),
        ("TCP_KEEPCNT", _PROBES),
        # Without probes: while something is not acknowledged, or the client's window stays closed.
        ("TCP_USER_TIMEOUT", round(1000 * (keepalive.time_s + keepalive.timeout_s))),
    ):
        if hasattr(socket, name):  # not on all systems
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} (router.http_port): {error.strerror}; "
            "stop the other program or choose another port"
        ) from error
    return made


class _Server(uvicorn.Server):
    """Signals belong to the router, not to uvicorn."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One client; ``opening`` are all of the server that have not sent a whole head, oldest first."""

    def __init__(self, opening: dict[_Connection, None], opening_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opening = opening
        self._opening_s = opening_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._forget()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self._opening_s, self._give_up)
        self._opening[self] = None
        if len(self._opening) > MAX_OPENING:
            next(iter(self._opening))._give_up()

    def _forget(self) -> None:
        self._opening.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._forget()
        self.transport.abort()
