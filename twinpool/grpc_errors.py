"""Errors as gRPC statuses with google.rpc details, and back."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from twinpool.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinpoolError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)


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


_CLOSES = "it closes the connection; it wants TLS, or a certificate of its own authority (tls-ca, tls-cert, tls-key)"
_REFUSALS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is of no authority trusted here; give the right one (tls-ca)"),
    ("Hostname Verification", "its certificate carries another name; dial that, or set the server name of TLS"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS; leave TLS out"),
    ("handshake failed", "the TLS handshake failed; compare certificates and authorities of both sides"),
    ("Socket closed", _CLOSES),  # a server that wants another certificate, or one at all, gives no reason
    ("reset by peer", _CLOSES),
)


def refused_connection(details: str) -> str | None:
    """Why a server that was reached gave no connection, from gRPC's own words; None: something else went wrong."""
    if "failed to connect" not in details.lower():
        return None
    found = re.search(r"ipv[46]:([^ ]+): ", details)
    reason = next((text for mark, text in _REFUSALS if mark in details), None)
    return None if reason is None or found is None else f"no connection to {unquote(found[1])}: {reason}"


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
            return Unavailable(refused_connection(message) or message)
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
    try:
        await context.abort_with_status(rpc_status.to_status(status_from_error(error)))
    except grpc.aio.InternalError as gone:  # the client's deadline was faster
        raise asyncio.CancelledError from gone
