"""The prefill worker's end of decode sessions (kv.v1).

A session begins with Hello; identity, revision, layout and connector are compared before anything else, and the
connector's metadata travels only in Welcome. From then on messages go to the hold table (open, done, abandon) or to
the connector. The session ends with the stream or after ``dead_after_s`` of silence, whether or not the peer still
takes what is sent to it; the hold table then ends every hold that the peer had joined, and the engine frees the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc.aio

from twinpool.config import SessionSection
from twinpool.errors import TwinpoolError, Unavailable
from twinpool.kv_transfer.connectors.base import ConnectorError
from twinpool.kv_transfer.holds import HoldTable
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import ConnectorMessage, FromPrefill
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.prefill_worker.translate import from_decode, to_decode
from twinpool.proto import kv_pb2, kv_pb2_grpc
from twinpool.rpc import Outbox
from twinpool.worker.kv_hello import KVIdentity

log = logging.getLogger(__name__)

SessionOutbox = Outbox[kv_pb2.SessionResponse]


class PeerOutboxes:
    """Where messages of the hold table go: any thread in, the peer's session out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outboxes: dict[str, SessionOutbox] = {}

    def open(self, peer: str) -> SessionOutbox:
        """A session began."""
        outbox = self._outboxes[peer] = Outbox()
        return outbox

    def close(self, peer: str) -> None:
        """A session ended; later messages to it are dropped."""
        self._outboxes.pop(peer).close()

    def send(self, peer: str, message: FromPrefill) -> None:
        """Queues a message; any thread. Order is kept per peer."""
        self._loop.call_soon_threadsafe(self._put, peer, message)

    def _put(self, peer: str, message: FromPrefill) -> None:
        if outbox := self._outboxes.get(peer):
            outbox.put(to_decode(message))


class KvService(kv_pb2_grpc.KvServiceServicer):
    """Serves any number of decode workers."""

    def __init__(
        self,
        identity: KVIdentity,
        holds: HoldTable,
        outboxes: PeerOutboxes,
        ranks: Sequence[RankEndpoint],
        transfer: TransferThread,
        section: SessionSection,
    ) -> None:
        self._identity = identity
        self._holds = holds
        self._outboxes = outboxes
        self._ranks = ranks
        self._transfer = transfer
        self._section = section
        self._sessions = itertools.count(1)

    async def Session(
        self, request_iterator: AsyncIterator[kv_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kv_pb2.SessionResponse]:
        """One decode worker's lease."""
        try:
            first = await asyncio.wait_for(anext(request_iterator), self._section.dead_after_s)
        except (TimeoutError, StopAsyncIteration) as error:
            raise Unavailable("the session was opened without Hello; upgrade the decode worker") from error
        self._identity.check(first.hello)
        peer = f"{first.hello.worker_id}/{first.hello.epoch:x}/{next(self._sessions)}"
        outbox = self._outboxes.open(peer)
        ending = contextlib.ExitStack()  # closed once, by the reader's end or by the stream's
        ending.callback(log.info, "decode worker %s left", peer)
        outbox.put_control(kv_pb2.SessionResponse(welcome=kv_pb2.Welcome(info=self._identity.to_proto())))
        self._holds.session_began(peer)
        targets = [rank.rank for rank in first.hello.ranks]
        self._transfer.post(partial(self._accept, peer, targets))
        ending.callback(self._transfer.post, partial(self._dismiss, peer, targets))
        ending.callback(self._holds.session_ended, peer)
        ending.callback(self._outboxes.close, peer)
        reader = asyncio.create_task(self._read(peer, targets, request_iterator, outbox))
        reader.add_done_callback(lambda _: ending.close())
        heart = asyncio.create_task(self._beat(outbox))
        ending.callback(heart.cancel)
        ending.callback(reader.cancel)
        log.info("decode worker %s joined", peer)
        try:
            async for response in outbox:
                yield response
        finally:
            ending.close()

    def _accept(self, peer: str, targets: Sequence[int]) -> None:
        for source in self._ranks:
            for target in targets:
                send = partial(self._send_payload, peer, source.rank, target)
                source.endpoint.accept(_reader(peer, target), send)

    def _dismiss(self, peer: str, targets: Sequence[int]) -> None:
        for source in self._ranks:
            for target in targets:
                source.endpoint.dismiss(_reader(peer, target))

    def _send_payload(self, peer: str, source: int, target: int, payload: bytes) -> None:
        self._outboxes.send(peer, ConnectorMessage(source, target, payload))

    async def _read(
        self, peer: str, targets: Sequence[int], requests: AsyncIterator[kv_pb2.SessionRequest], outbox: SessionOutbox
    ) -> None:
        try:
            while True:
                async with asyncio.timeout(self._section.dead_after_s):
                    request = await anext(requests)
                if request.WhichOneof("message") != "heartbeat":
                    self._take(peer, targets, request, outbox)
        except StopAsyncIteration:
            log.debug("%s closed the stream", peer)
        except TimeoutError:
            log.warning("no sign of life from %s, its holds end", peer)
        except (TwinpoolError, ValueError) as error:
            log.warning("session with %s ends: %s", peer, error)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            log.info("session with %s broke: %s", peer, error)
        finally:
            outbox.close()

    def _take(self, peer: str, targets: Sequence[int], request: kv_pb2.SessionRequest, outbox: SessionOutbox) -> None:
        message = from_decode(request)
        if isinstance(message, ConnectorMessage):
            if message.source >= len(self._ranks) or message.target not in targets:
                raise ValueError(f"a payload from rank {message.target} to rank {message.source}: there is none")
            self._transfer.post(partial(self._deliver, peer, message, asyncio.get_running_loop(), outbox))
        else:
            self._holds.receive(peer, message)

    def _deliver(
        self, peer: str, message: ConnectorMessage, loop: asyncio.AbstractEventLoop, outbox: SessionOutbox
    ) -> None:
        """On the transfer thread: a payload that makes no sense ends its session, never the process."""
        try:
            self._ranks[message.source].endpoint.deliver(_reader(peer, message.target), message.payload)
        except ConnectorError as error:
            log.warning("session with %s ends: %s", peer, error)
            loop.call_soon_threadsafe(outbox.close)

    async def _beat(self, outbox: SessionOutbox) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._section.report_interval_s)
                outbox.put_control(kv_pb2.SessionResponse(heartbeat=kv_pb2.Heartbeat()))


def _reader(peer: str, target: int) -> str:
    """The name of one rank of a decode worker, for connectors."""
    return f"{peer}/{target}"
