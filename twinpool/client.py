"""The blocking Python client.

Life of a call: the request is sent; while nothing came back, UNAVAILABLE is answered by a few retries within the
timeout; after the first message an error ends the stream. Closing a stream early cancels the request on both pools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from twinpool.errors import TwinpoolError, Unavailable
from twinpool.grpc_errors import error_from_rpc
from twinpool.prompt import Message, Options, Prompt, to_request
from twinpool.proto import inference_pb2 as pb
from twinpool.proto import inference_pb2_grpc as pb_grpc
from twinpool.results import Chunk, Collector, Completion, Model, Status, models_from_proto, status_from_proto
from twinpool.retry import Retries
from twinpool.rpc import MAX_MESSAGE_BYTES
from twinpool.tls import ClientTls
from twinpool.trace import Trace, trace_from_proto

DEFAULT_ADDRESS = "127.0.0.1:8100"
INFO_TIMEOUT_S = 10.0

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 30_000),
]


class Client:
    """A connection to a router, for use from any number of threads.

    Args:
        address: host:port of the router's gRPC port.
        token: API key, for routers that ask for one.
        tls: for routers that speak TLS; True trusts the system's authorities.
        timeout: seconds for calls that give none; None leaves the limit to the router.
        max_retries: how often a call that got no answer yet is sent again when the router is unavailable.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: ClientTls | bool = False,
        timeout: float | None = None,
        max_retries: int = 3,
    ) -> None:
        self.address = address
        self._channel = _channel(address, as_tls(tls))
        self._inference = pb_grpc.InferenceServiceStub(self._channel)
        self._info = pb_grpc.InfoServiceStub(self._channel)
        self._metadata = bearer(token)
        self._timeout = timeout
        self._max_retries = max_retries

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Generates an answer to text, token ids or messages, and waits for all of it.

        Raises:
            TwinpoolError: its subclasses say why (InvalidRequest, Overloaded, Unavailable, DeadlineExceeded, ...).
        """
        with self._open(prompt, options, whole=True) as stream:
            for _ in stream:
                pass
        return stream.result

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Like ``generate``, for a conversation; text is taken as one user message."""
        return self.generate(as_messages(messages), **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Generates and yields chunks as they are sampled; ``Stream.result`` is the whole afterwards."""
        return self._open(prompt, options, whole=False)

    def _open(self, prompt: Prompt, options: Options, whole: bool) -> Stream:
        retries = Retries(self._max_retries, options.get("timeout", self._timeout))
        request = to_request(prompt, options)
        return Stream(self._inference, request, self._metadata, retries, self.address, whole)

    def models(self) -> tuple[Model, ...]:
        """The served models, the default first."""
        return models_from_proto(self._call(self._info.ListModels, pb.ListModelsRequest()))

    def status(self) -> Status:
        """Workers, links and load, as the router sees them now."""
        return status_from_proto(self._call(self._info.GetStatus, pb.GetStatusRequest()))

    def trace(self, request_id: str) -> Trace:
        """Where the time of a recent request went. Raises NotFound once the router has forgotten it."""
        return trace_from_proto(self._call(self._info.GetTrace, pb.GetTraceRequest(request_id=request_id)))

    def _call(self, method: Any, request: Any) -> Any:
        retries = Retries(self._max_retries, self._timeout or INFO_TIMEOUT_S)
        while True:
            try:
                return method(request, timeout=retries.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                delay_s = retries.next_delay(failure := to_error(error, self.address))
                if delay_s is None:
                    raise failure from error
                time.sleep(delay_s)

    def close(self) -> None:
        """Closes the connection; open streams end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """Chunks of one response; iterate once. Leaving the ``with`` block early cancels the request."""

    def __init__(
        self,
        stub: pb_grpc.InferenceServiceStub,
        request: pb.GenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        retries: Retries,
        address: str,
        whole: bool,
    ) -> None:
        """``whole``: nobody sees chunks before the end, so that an answer which broke off may be asked for anew."""
        self._whole = whole
        self._send: Callable[[], Any] = lambda: stub.Generate(request, timeout=retries.time_left(), metadata=metadata)
        self._retries = retries
        self._address = address
        self._collector = Collector()
        self._call: Any = None
        self._complete = False

    @property
    def result(self) -> Completion:
        """The whole response; RuntimeError before the last chunk."""
        if not self._complete:
            raise RuntimeError("the stream has not ended; iterate it to its end first")
        return self._collector.completion()

    def __iter__(self) -> Iterator[Chunk]:
        while not self._complete:
            started = False
            self._collector = Collector()
            self._call = self._send()
            try:
                for message in self._call:
                    if not started:
                        started = True
                        self._collector.request_id = request_id(self._call.initial_metadata())
                    yield self._collector.add(message)
                self._complete = True
            except grpc.RpcError as error:
                failure = to_error(error, self._address)
                delay_s = None if started and not self._whole else self._retries.next_delay(failure)
                if delay_s is None:
                    raise failure from error
                time.sleep(delay_s)

    def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        if self._call is not None and not self._complete:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_tls(tls: ClientTls | bool) -> ClientTls | None:
    """True as the system's authorities, False as none."""
    return (ClientTls() if tls else None) if isinstance(tls, bool) else tls


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), options=[*_OPTIONS, *tls.options])


def as_messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Text as one user message; messages as they are."""
    return [Message(role="user", content=messages)] if isinstance(messages, str) else messages


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries the token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def request_id(metadata: Any) -> str:
    """The request's id from the initial metadata."""
    return next((str(value) for key, value in metadata or () if key == "x-request-id"), "")


def to_error(error: grpc.RpcError, address: str) -> TwinpoolError:
    """The typed error; one that says so when no server answers at ``address``."""
    failure = error_from_rpc(error)
    if isinstance(failure, Unavailable) and ("lookup" in failure.message or "DNS resolution" in failure.message):
        return Unavailable(f"the host of {address} cannot be found; correct the address (--address)")
    if isinstance(failure, Unavailable) and "failed to connect" in failure.message.lower():
        return Unavailable(f"no router answers at {address}; start one (twinpool up) or give its address (--address)")
    return failure
