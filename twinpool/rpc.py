"""gRPC plumbing shared by all processes: servers, channels, the outgoing side of a session.

A server's life: ``RpcServer.start`` binds and serves with health NOT_SERVING for every service but ``""`` (alive);
the owner calls ``set_serving`` when a service is ready; ``stop`` turns health to NOT_SERVING first, then waits for
open calls for at most the grace period. With TLS a second port may serve health alone, in plain text, for probes.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinpool.config import Config
from twinpool.errors import ConfigError, Unauthenticated
from twinpool.interceptors import (
    Authenticate,
    Doorkeeper,
    ErrorInterceptor,
    TokenResponsesInterceptor,
    TokenStreamInterceptor,
    TokenUnaryInterceptor,
    authorization,
)
from twinpool.tls import ClientTls, ServerTls, internal_client

__all__ = ["authorization"]
PROTOCOL_VERSION = 1
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""What servers take in one message: a million and a half token ids fit; workers' sessions stay far below."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""What clients take in one message: the log probabilities of a long prompt come in one."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """What a connection must show of itself.

    Args:
        time_s: after so much silence the other end is asked for a sign of life.
        timeout_s: without one within this, the connection is closed and its calls are cancelled.
        opening_s: a new connection must be ready for requests within this.
    """

    time_s: float = 30.0
    timeout_s: float = 10.0
    opening_s: float = 30.0

    @property
    def options(self) -> list[tuple[str, int]]:
        """As options of a gRPC server or channel."""
        return [
            ("grpc.keepalive_time_ms", round(self.time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
        ]

    @property
    def server_options(self) -> list[tuple[str, int]]:
        """As options of a gRPC server, which also asks connections without calls."""
        return [
            *self.options,
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.server_handshake_timeout_ms", round(self.opening_s * 1000)),
        ]


_KEEPALIVE = Keepalive()
_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
# A worker that restarts is back in seconds; gRPC's default back-off of up to two minutes would hide it.
_CHANNEL_OPTIONS = [
    *_KEEPALIVE.options,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Servicer:
    """A service to serve: its full name and the call that adds it to a server."""

    name: str
    add: Callable[[grpc.aio.Server], None]


class RpcServer:
    """A gRPC server with health, reflection, error mapping, and optionally TLS and authentication."""

    def __init__(
        self,
        servers: Sequence[grpc.aio.Server],
        health_servicer: health.aio.HealthServicer,
        port: int,
        health_port: int | None,
    ) -> None:
        self._servers = servers
        self._health = health_servicer
        self.port = port
        self.health_port = health_port

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        servicers: Sequence[Servicer],
        token: str | None = None,
        tls: ServerTls | None = None,
        health_port: int | None = None,
        authenticate: Authenticate | None = None,
        keepalive: Keepalive = _KEEPALIVE,
    ) -> RpcServer:
        """Binds ``host:port`` (0 picks a free port) and serves.

        Calls must bring the cluster's ``token`` or satisfy ``authenticate``, those for health excepted;
        ``health_port`` serves health alone, in plain text.

        Raises:
            ConfigError: an address cannot be bound, or a TLS file is missing or wrong.
        """
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if authenticate := authenticate or cluster_token(token):
            interceptors.append(Doorkeeper(authenticate))
        options = [*_SERVER_OPTIONS, *keepalive.server_options]
        server = grpc.aio.server(interceptors=interceptors, options=options)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        for servicer in servicers:
            servicer.add(server)
        names = [servicer.name for servicer in servicers]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        bound = _bind(server, host, port, tls)
        servers = [server]
        probed = None
        if health_port is not None:
            servers.append(grpc.aio.server(options=options))
            health_pb2_grpc.add_HealthServicer_to_server(health_servicer, servers[1])
            probed = _bind(servers[1], host, health_port, None)
        for name in names:
            await health_servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        for each in servers:
            await each.start()
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        return cls(servers, health_servicer, bound, probed)

    async def set_serving(self, service: str, serving: bool) -> None:
        """Sets the health of one service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Stops: NOT_SERVING first, then open calls get ``grace_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def dialled(host: str) -> str:
    """The address at which a listener on ``host`` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(host, host)


def _bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    address = f"{host}:{port}"
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.grpc_credentials()))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: it is in use or not an address of this machine; "
            "stop the other program or choose another port"
        ) from error


def cluster_token(token: str | None) -> Authenticate | None:
    """Lets calls pass that bring ``token``; None, when there is no token, lets all pass."""
    if not token:
        return None
    expected = f"Bearer {token}".encode()

    def authenticate(authorization: str) -> None:
        if not hmac.compare_digest(authorization.encode(), expected):
            raise Unauthenticated("the bearer token is missing or wrong; set session.token on both sides")

    return authenticate


def channel(address: str, token: str | None = None, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """Opens a channel to ``host:port``; ``token`` is sent as a bearer token with every call.

    Raises:
        ConfigError: a TLS file is missing.
    """
    kinds = (TokenUnaryInterceptor, TokenResponsesInterceptor, TokenStreamInterceptor)  # one class per call shape
    interceptors = [kind(token) for kind in kinds] if token else []
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS, interceptors=interceptors)
    options = [*_CHANNEL_OPTIONS, *tls.options]
    return grpc.aio.secure_channel(address, tls.credentials(), options=options, interceptors=interceptors)


@dataclass(frozen=True, slots=True)
class Dialer:
    """How this process reaches workers: with the cluster token, over TLS where that is configured."""

    token: str | None = None
    tls: ClientTls | None = None

    @classmethod
    def of(cls, config: Config) -> Dialer:
        """As configured."""
        return cls(config.session.token, internal_client(config.tls))

    def channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel; TLS files are read anew. Raises ConfigError: one is missing."""
        return channel(address, self.token, self.tls)


class Outbox(Generic[T]):
    """The outgoing side of a session: one writer, control messages ahead of data.

    ``put`` and ``put_control`` never block and belong to the event loop's thread. Data that waits unsent may be
    merged by the caller through ``last_data``. Iteration ends after ``close`` once everything was handed out.
    """

    def __init__(self) -> None:
        self._control: deque[T] = deque()
        self._data: deque[T] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: T) -> None:
        """Queues data in order; dropped after ``close``."""
        if not self._closed:
            self._data.append(message)
            self._wake.set()

    def put_control(self, message: T) -> None:
        """Queues a message ahead of all data, behind earlier control messages."""
        if not self._closed:
            self._control.append(message)
            self._wake.set()

    @property
    def last_data(self) -> T | None:
        """The newest unsent data message, which the caller may still change."""
        return self._data[-1] if self._data else None

    def close(self) -> None:
        """Ends the iteration once what is queued was handed out. Idempotent."""
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            if self._control:
                yield self._control.popleft()
            elif self._data:
                yield self._data.popleft()
            elif self._closed:
                return
            else:
                self._wake.clear()
                await self._wake.wait()
