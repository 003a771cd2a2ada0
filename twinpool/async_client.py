"""The asyncio Python client: the same calls as ``twinpool.client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from twinpool.client import DEFAULT_ADDRESS, INFO_TIMEOUT_S, as_messages, as_tls, bearer, request_id, to_error
from twinpool.prompt import Message, Options, Prompt, to_request
from twinpool.proto import inference_pb2 as pb
from twinpool.proto import inference_pb2_grpc as pb_grpc
from twinpool.results import Chunk, Collector, Completion, Model, Status, models_from_proto, status_from_proto
from twinpool.retry import Retries
from twinpool.rpc import channel
from twinpool.tls import ClientTls
from twinpool.trace import Trace, trace_from_proto


class AsyncClient:
    """A connection to a router, for one event loop; made inside it. The arguments are those of ``Client``."""

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
        self._channel = channel(address, tls=as_tls(tls))
        self._inference = pb_grpc.InferenceServiceStub(self._channel)
        self._info = pb_grpc.InfoServiceStub(self._channel)
        self._metadata = bearer(token)
        self._timeout = timeout
        self._max_retries = max_retries

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Generates an answer to text, token ids or messages, and waits for all of it.

        Raises:
            TwinpoolError: its subclasses say why (InvalidRequest, Overloaded, Unavailable, DeadlineExceeded, ...).
        """
        async with self._open(prompt, options, whole=True) as stream:
            async for _ in stream:
                pass
        return stream.result

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Like ``generate``, for a conversation; text is taken as one user message."""
        return await self.generate(as_messages(messages), **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Generates and yields chunks as they are sampled; ``AsyncStream.result`` is the whole afterwards."""
        return self._open(prompt, options, whole=False)

    def _open(self, prompt: Prompt, options: Options, whole: bool) -> AsyncStream:
        retries = Retries(self._max_retries, options.get("timeout", self._timeout))
        request = to_request(prompt, options)
        return AsyncStream(self._inference, request, self._metadata, retries, self.address, whole)

    async def models(self) -> tuple[Model, ...]:
        """The served models, the default first."""
        return models_from_proto(await self._call(self._info.ListModels, pb.ListModelsRequest()))

    async def status(self) -> Status:
        """Workers, links and load, as the router sees them now."""
        return status_from_proto(await self._call(self._info.GetStatus, pb.GetStatusRequest()))

    async def trace(self, request_id: str) -> Trace:
        """Where the time of a recent request went. Raises NotFound once the router has forgotten it."""
        return trace_from_proto(await self._call(self._info.GetTrace, pb.GetTraceRequest(request_id=request_id)))

    async def _call(self, method: Any, request: Any) -> Any:
        retries = Retries(self._max_retries, self._timeout or INFO_TIMEOUT_S)
        while True:
            try:
                return await method(request, timeout=retries.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                delay_s = retries.next_delay(failure := to_error(error, self.address))
                if delay_s is None:
                    raise failure from error
                await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Closes the connection; open streams end as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """Chunks of one response; iterate once. Leaving the ``async with`` block early cancels the request."""

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

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while not self._complete:
            started = False
            self._collector = Collector()
            self._call = self._send()
            try:
                async for message in self._call:
                    if not started:
                        started = True
                        self._collector.request_id = request_id(await self._call.initial_metadata())
                    yield self._collector.add(message)
                self._complete = True
            except grpc.RpcError as error:
                failure = to_error(error, self._address)
                delay_s = None if started and not self._whole else self._retries.next_delay(failure)
                if delay_s is None:
                    raise failure from error
                await asyncio.sleep(delay_s)

    def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        if self._call is not None and not self._complete:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
