"""gRPC plumbing shared by all processes: servers, channels, errors as statuses, the outgoing side of a session.

A server's life: ``RpcServer.start`` binds and serves with health NOT_SERVING for every service but ``""`` (alive);
the owner calls ``set_serving`` when a service is ready; ``stop`` turns health to NOT_SERVING first, then waits for
open calls for at most the grace period.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from twinpool.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinpoolError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [*_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 10_000)]
# A worker that restarts is back in seconds; gRPC's default back-off of up to two minutes would hide it.
_CHANNEL_OPTIONS = [
    *_OPTIONS,
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
    """A gRPC server with health, reflection, error mapping and an optional bearer token."""

    def __init__(self, server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, host: str, port: int):
        self._server = server
        self._health = health_servicer
        self.host = host
        self.port = port

    @classmethod
    async def start(cls, host: str, port: int, servicers: Sequence[Servicer], token: str | None = None) -> RpcServer:
        """Binds ``host:port`` (0 picks a free port) and serves.

        Raises:
            ConfigError: the address cannot be bound.
        """
        interceptors: list[grpc.aio.ServerInterceptor] = [_ErrorInterceptor()]
        if token:
            interceptors.append(_TokenInterceptor(token))
        server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        for servicer in servicers:
            servicer.add(server)
        names = [servicer.name for servicer in servicers]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: it is in use or not an address of this machine; "
                "stop the other program or choose another port"
            ) from error
        for name in names:
            await health_servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        return cls(server, health_servicer, host, bound)

    async def set_serving(self, service: str, serving: bool) -> None:
        """Sets the health of one service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Stops: NOT_SERVING first, then open calls get ``grace_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def dialled(host: str) -> str:
    """The address at which a listener on ``host`` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(host, host)


def channel(address: str, token: str | None = None) -> grpc.aio.Channel:
    """Opens a channel to ``host:port``; ``token`` is sent as a bearer token with every call."""
    kinds = (_TokenUnaryInterceptor, _TokenResponsesInterceptor, _TokenStreamInterceptor)  # one class per call shape
    interceptors = [kind(token) for kind in kinds] if token else []
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS, interceptors=interceptors)


def status_from_error(error: TwinpoolError) -> status_pb2.Status:
    """The google.rpc.Status that carries ``error``."""
    details = []
    if isinstance(error, InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=packed)


def error_from_rpc(error: grpc.RpcError) -> TwinpoolError:
    """The error that a server raised, from the status that a client received."""
    code, message = error.code(), error.details() or error.code().name
    field, retry_after_s = "", 1.0
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(message, field)
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unsupported(message, field)
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFound(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(message, retry_after_s)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case grpc.StatusCode.CANCELLED:
            return Cancelled(message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case _:
            return TwinpoolError(message)


async def abort(context: grpc.aio.ServicerContext, error: TwinpoolError) -> None:
    """Ends the call with ``error``'s status; never returns."""
    await context.abort_with_status(rpc_status.to_status(status_from_error(error)))


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


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns TwinpoolError raised by a handler into its status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.response_streaming:
            return _replace_stream(handler)
        return _replace_unary(handler)


def _replace_unary(handler: Any) -> grpc.RpcMethodHandler:
    inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            result = inner(request, context)
            return await result if asyncio.iscoroutine(result) else result
        except TwinpoolError as error:
            await abort(context, error)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(call, handler.request_deserializer, handler.response_serializer)


def _replace_stream(handler: Any) -> grpc.RpcMethodHandler:
    inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except TwinpoolError as error:
            await abort(context, error)

    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await inner(request, context)
        except TwinpoolError as error:
            await abort(context, error)

    # Handlers either yield responses or write them to the context (health's Watch does).
    call = generate if inspect.isasyncgenfunction(inner) else write
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    return make(call, handler.request_deserializer, handler.response_serializer)


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the bearer token; health stays open for probes."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        raw = given if isinstance(given, bytes) else given.encode()
        if handler_call_details.method.startswith("/grpc.health.v1.Health/") or hmac.compare_digest(
            raw, self._expected
        ):
            return await continuation(handler_call_details)
        return await _deny(continuation, handler_call_details)


async def _deny(
    continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
    details: grpc.HandlerCallDetails,
) -> grpc.RpcMethodHandler | None:
    handler = await continuation(details)
    if handler is None:
        return None

    async def deny_unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await abort(context, Unauthenticated("the bearer token is missing or wrong; set session.token on both sides"))

    async def deny_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await deny_unary(request, context)
        yield None

    match handler.request_streaming, handler.response_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(deny_unary)
        case False, True:
            return grpc.unary_stream_rpc_method_handler(deny_stream)
        case True, False:
            return grpc.stream_unary_rpc_method_handler(deny_unary)
        case _:
            return grpc.stream_stream_rpc_method_handler(deny_stream)


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {token}"))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _TokenUnaryInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _TokenResponsesInterceptor(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _TokenStreamInterceptor(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request_iterator)
