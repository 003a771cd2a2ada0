"""What stands between a gRPC call and its handler: errors as statuses, the check of credentials, bearer tokens."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from twinpool.errors import InvalidRequest, TwinpoolError, Unauthenticated
from twinpool.grpc_errors import abort

Authenticate = Callable[[str], None]
"""Takes a call's ``authorization``; raises Unauthenticated."""


class _Malformed:
    """Stands for a message that could not be read: gRPC would blame the server for it."""


_MALFORMED = _Malformed()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns TwinpoolError raised by a handler into its status, and unreadable messages into INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See grpc.aio."""
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
            request = _checked(request, handler.request_streaming)
            result = inner(request, context)
            return await result if asyncio.iscoroutine(result) else result
        except TwinpoolError as error:
            await abort(context, error)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(call, _tolerant(handler.request_deserializer), handler.response_serializer)


def _replace_stream(handler: Any) -> grpc.RpcMethodHandler:
    inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            request = _checked(request, handler.request_streaming)
            async for response in inner(request, context):
                yield response
        except TwinpoolError as error:
            await abort(context, error)

    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await inner(_checked(request, handler.request_streaming), context)
        except TwinpoolError as error:
            await abort(context, error)

    # Handlers either yield responses or write them to the context (health's Watch does).
    call = generate if inspect.isasyncgenfunction(inner) else write
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    return make(call, _tolerant(handler.request_deserializer), handler.response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return read


def _checked(request: Any, streaming: bool) -> Any:
    if streaming:
        return _checked_stream(request)
    if request is _MALFORMED:
        raise InvalidRequest("the message is not a protobuf of the expected type; use the published .proto files")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request, False)


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Refuses calls that do not authenticate; health stays open for probes."""

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See grpc.aio."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc.health.v1.Health/"):
            return handler
        try:
            self._authenticate(authorization(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            return _denial(handler, error)
        return handler


def authorization(metadata: Any) -> str:
    """The ``authorization`` of a call's metadata; empty without one."""
    given = dict(metadata or ()).get("authorization", "")
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)


def _denial(handler: Any, error: Unauthenticated) -> grpc.RpcMethodHandler:
    """Answers in the handler's shape; requests are not read."""

    async def deny_unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await abort(context, error)

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


class TokenUnaryInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends a bearer token with calls of one request and one response."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See grpc.aio."""
        return await continuation(_with_token(client_call_details, self._token), request)


class TokenResponsesInterceptor(grpc.aio.UnaryStreamClientInterceptor):
    """Sends a bearer token with calls of one request and many responses."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See grpc.aio."""
        return await continuation(_with_token(client_call_details, self._token), request)


class TokenStreamInterceptor(grpc.aio.StreamStreamClientInterceptor):
    """Sends a bearer token with sessions."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See grpc.aio."""
        return await continuation(_with_token(client_call_details, self._token), request_iterator)
