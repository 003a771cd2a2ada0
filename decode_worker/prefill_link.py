"""The decode worker's session with one prefill worker (kv.v1), kept as long as the router names the peer.

Life cycle, again and again until ``close``:

1. Dial, send Hello, compare Welcome (identity, epoch, revision, layout, connector).
2. The import table links: agents connect and a warm-up read measures the transport. Only then is the pair usable.
3. Messages go both ways; exchanges belong to the link.
4. The stream ends, the peer is silent for ``dead_after_s``, or the table gives the link up: unlink (the table ends the
   link's exchanges and frees what they held), then back off with jitter and dial again.

The table runs on the transfer thread; ``Exchanges`` is this side's way to it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Protocol

import grpc
import grpc.aio

from twinpool import rpc
from twinpool.config import SessionSection
from twinpool.decode_worker.translate import from_prefill, to_prefill
from twinpool.errors import TwinpoolError, Unavailable
from twinpool.grpc_errors import error_from_rpc
from twinpool.kv_transfer.messages import FromDecode, FromPrefill
from twinpool.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from twinpool.worker.kv_hello import KVIdentity, RankRegion

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 2.0


class Exchanges(Protocol):
    """The import table, from the event loop's thread; none of these calls block."""

    def link(self, link: PrefillLink, regions: list[RankRegion]) -> None:
        """Connects to the regions of a peer; ``link.linked`` or ``link.broken`` follows."""

    def unlink(self, link: PrefillLink) -> None:
        """The session is gone."""

    def receive(self, link: PrefillLink, message: FromPrefill) -> None:
        """A message of the peer."""


class PrefillLink:
    """One peer; see the module's life cycle. All methods run on the event loop."""

    def __init__(
        self,
        peer: worker_pb2.Peer,
        identity: KVIdentity,
        exchanges: Exchanges,
        section: SessionSection,
        dialer: rpc.Dialer,
    ) -> None:
        self.peer = peer
        self.key = f"{peer.worker_id}/{peer.epoch:x}"
        self._identity = identity
        self._exchanges = exchanges
        self._section = section
        self._dialer = dialer
        self._outbox: rpc.Outbox[kv_pb2.SessionRequest] = rpc.Outbox()
        self._state = worker_pb2.Linked(worker_id=peer.worker_id, epoch=peer.epoch, error="connecting")
        self._given_up = ""
        self._task = asyncio.create_task(self._run(), name=f"kv-link-{peer.worker_id}")

    @property
    def state(self) -> worker_pb2.Linked:
        """What reports say of this link."""
        return self._state

    def linked(self, transport: str, gbps: float) -> None:
        """The warm-up read worked."""
        log.info("linked to %s over %s, %.2f GB/s", self.peer.worker_id, transport, gbps)
        self._state = worker_pb2.Linked(
            worker_id=self.peer.worker_id,
            epoch=self.peer.epoch,
            linked=True,
            transport=transport,
            gigabytes_per_second=gbps,
        )

    def broken(self, reason: str) -> None:
        """The table gave the link up: the session starts over."""
        self._given_up = reason
        self._fail(reason)
        self._outbox.close()

    def send(self, message: FromDecode) -> None:
        """Queues a message; exchange messages are control, they never wait behind data."""
        self._outbox.put_control(to_prefill(message))

    def close(self) -> None:
        """Ends the session and stops dialling."""
        self._task.cancel()

    def _fail(self, reason: str) -> None:
        self._state = worker_pb2.Linked(worker_id=self.peer.worker_id, epoch=self.peer.epoch, error=reason)

    async def _run(self) -> None:
        backoff = 0.05
        while True:
            try:
                await self._session()
                reason = "the prefill worker closed the session"
            except grpc.RpcError as error:
                reason = error_from_rpc(error).message
            except TwinpoolError as error:
                reason = error.message
            except ValueError as error:  # it says what has no place in a session
                reason = str(error)
            reason = self._given_up or reason  # the end of the session is only what follows
            if self._state.linked:
                backoff = 0.05
            if self._state.linked or reason != self._state.error:
                log.warning("no link to %s: %s", self.peer.worker_id, reason)
            self._fail(reason)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _session(self) -> None:
        self._given_up = ""
        self._outbox = rpc.Outbox()
        self._outbox.put_control(kv_pb2.SessionRequest(hello=self._identity.to_proto()))
        async with self._dialer.channel(self.peer.kv_address) as channel:
            responses = kv_pb2_grpc.KvServiceStub(channel).Session(aiter(self._outbox))
            regions = self._check(await self._next(responses))
            heartbeat = asyncio.create_task(self._beat())
            self._exchanges.link(self, regions)
            try:
                while True:
                    response = await self._next(responses)
                    if response.WhichOneof("message") != "heartbeat":
                        self._exchanges.receive(self, from_prefill(response))
            finally:
                self._outbox.close()
                heartbeat.cancel()
                responses.cancel()
                self._exchanges.unlink(self)

    def _check(self, response: kv_pb2.SessionResponse) -> list[RankRegion]:
        info = response.welcome.info
        self._identity.check(info)
        if (info.worker_id, info.epoch) != (self.peer.worker_id, self.peer.epoch):
            raise Unavailable(
                f"{self.peer.kv_address} is {info.worker_id} (epoch {info.epoch:x}) and no longer "
                f"{self.peer.worker_id} (epoch {self.peer.epoch:x}); waiting for the router to name the new one"
            )
        return list(self._identity.peer_regions(info))

    async def _next(self, responses: grpc.aio.StreamStreamCall) -> kv_pb2.SessionResponse:
        try:
            async with asyncio.timeout(self._section.dead_after_s):
                response: kv_pb2.SessionResponse = await responses.read()
        except TimeoutError as error:
            raise Unavailable(f"no sign of life from {self.peer.worker_id}") from error
        if response is grpc.aio.EOF:
            status = await responses.code()
            if status == grpc.StatusCode.OK:
                raise Unavailable(f"{self.peer.worker_id} closed the session")
            raise Unavailable(await responses.details() or status.name)
        return response

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._section.report_interval_s)
            self._outbox.put_control(kv_pb2.SessionRequest(heartbeat=kv_pb2.Heartbeat()))
