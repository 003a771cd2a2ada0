"""One measured request: sent over gRPC, timed where the client sees it, with the split that the workers report."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from twinpool.client import bearer, to_error
from twinpool.prompt import Options, to_request
from twinpool.proto import inference_pb2_grpc as pb_grpc
from twinpool.results import Collector, Completion
from twinpool.rpc import channel
from twinpool.tls import ClientTls

Route = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class Sample:
    """``arrivals``: seconds from sending to each message with a token."""

    arrivals: tuple[float, ...]
    completion: Completion

    @property
    def ttft_s(self) -> float:
        """Sent to first token."""
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens, the first gap first."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Probe:
    """Sends requests along a given route; the router must allow it (``router.route_hints``)."""

    def __init__(self, address: str, token: str | None, tls: ClientTls | None, vocab_size: int, seed: int = 0) -> None:
        self._address = address
        self._channel = channel(address, tls=tls)
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)
        self._metadata = bearer(token)
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens: no two prompts share a prefix that a cache could hit."""
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]

    async def send(self, prompt: Sequence[int], route: Route | None, max_tokens: int) -> Sample:
        """Sends one greedy request and reads it to its end. None leaves the route to the router.

        Raises:
            TwinpoolError: it failed.
        """
        options: Options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        request = to_request(prompt, options)
        metadata = self._metadata if route is None else (*self._metadata, ("x-twinpool-route", route))
        collector, arrivals = Collector(), []
        sent = time.perf_counter()
        try:
            async for message in self._stub.Generate(request, metadata=metadata):
                now = time.perf_counter()
                chunk = collector.add(message)
                arrivals += [now - sent] * len(chunk.token_ids)
        except grpc.RpcError as error:
            raise to_error(error, self._address) from error
        return Sample(tuple(arrivals), collector.completion())

    async def close(self) -> None:
        """Closes the connection; requests under way are cancelled."""
        await self._channel.close()
