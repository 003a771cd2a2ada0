"""Errors that users meet: a cause and a remedy in one line, and the gRPC status that carries them.

Servers raise these; one interceptor turns them into statuses with google.rpc details, HTTP into OpenAI-style
bodies, and the client library turns statuses back into the same classes.
"""

from __future__ import annotations

import grpc


class TwinpoolError(Exception):
    """Base of all errors shown to users."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    kind: str = "internal_error"
    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(TwinpoolError):
    """The configuration, a flag, a path or a port is wrong; nothing was started."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500
    kind = "config_error"
    exit_code = 2


class InvalidRequest(TwinpoolError):
    """A request field has a bad value; ``field`` names it."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Unsupported(InvalidRequest):
    """A request asks for something that this deployment cannot do; it is refused, never ignored."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400
    kind = "unsupported"


class NotFound(TwinpoolError):
    """What a request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    kind = "not_found"


class ModelNotFound(NotFound):
    """No such model is served."""

    kind = "model_not_found"


class Overloaded(TwinpoolError):
    """There is no room now; ``retry_after_s`` says when to try again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    kind = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TwinpoolError):
    """No worker can serve, or the deployment is draining."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    kind = "unavailable"


class DeadlineExceeded(TwinpoolError):
    """The request's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    kind = "deadline_exceeded"


class Cancelled(TwinpoolError):
    """The client cancelled."""

    code = grpc.StatusCode.CANCELLED
    http_status = 499
    kind = "cancelled"


class Unauthenticated(TwinpoolError):
    """Credentials are missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    kind = "unauthenticated"
