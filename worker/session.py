"""The worker's end of router sessions (worker.v1).

Life cycle of a session:

1. The router dials and sends Hello; an unequal protocol is refused with both values.
2. Welcome describes the worker; from then on a report goes out every report interval.
3. Submit and Cancel become engine commands; outputs come back through the session's mailbox.
4. The session ends when the stream does or when the router is silent for ``dead_after_s``: all its attempts are
   cancelled, so blocks, holds and exchanges of a router that is gone are free within a step. That waits for no
   response: one that a router on a half-open connection does not take stays in gRPC until keepalive ends the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio

from twinpool.config import SessionSection
from twinpool.engine.request import FailureCode, Request
from twinpool.errors import ConfigError, TwinpoolError, Unavailable
from twinpool.logs import set_level
from twinpool.proto import worker_pb2, worker_pb2_grpc
from twinpool.rpc import PROTOCOL_VERSION, Outbox
from twinpool.worker.draining import Draining
from twinpool.worker.outputs import Mailbox, OutputFan
from twinpool.worker.translate import request_from_submit

log = logging.getLogger(__name__)

# Bounds of what a session may keep here; a router of ours stays far below.
_ADDRESS = re.compile(r"[A-Za-z0-9._\-\[\]:%]{1,255}:[0-9]{1,5}")
MAX_PEERS = 4096
MAX_ROUTER_ID = 256
MAX_OPEN_PROMPTS = 1024
MAX_OPEN_TOKENS = 16 << 20


class Refused(Exception):
    """An attempt that the worker does not start."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Attempts(Protocol):
    """What a session may do with attempts; implemented by each role."""

    def now(self) -> float:
        """Engine clock, seconds."""

    def submit(self, request: Request, prefill_worker: str, prefill_epoch: int) -> None:
        """Starts an attempt. Raises Refused: draining, or the prefill worker is not linked."""

    def cancel(self, attempt_id: int) -> None:
        """Ends an attempt."""

    def cancel_origin(self, origin: int) -> None:
        """Ends all attempts of a session."""

    def peers(self, origin: int, peers: list[worker_pb2.Peer]) -> None:
        """Takes the complete set of prefill workers that a session's router sees."""

    @property
    def draining(self) -> Draining:
        """Whether it refuses new attempts, which an operator may order."""

    def flush_cache(self) -> None:
        """Forgets cached prefixes; what is submitted afterwards finds none."""

    def report(self) -> worker_pb2.Report:
        """The load now."""

    def info(self) -> worker_pb2.WorkerInfo:
        """The worker's self-description."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves any number of routers."""

    def __init__(self, attempts: Attempts, fan: OutputFan, section: SessionSection) -> None:
        self._attempts = attempts
        self._fan = fan
        self._section = section
        self._origins = itertools.count(1)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """One router's lease."""
        try:
            first = await asyncio.wait_for(anext(request_iterator), self._section.dead_after_s)
        except (TimeoutError, StopAsyncIteration) as error:
            raise Unavailable("the session was opened without Hello; upgrade the router") from error
        router_id = first.hello.router_id.encode("ascii", "replace").decode()
        if not router_id.isprintable() or len(router_id) > MAX_ROUTER_ID:
            raise ConfigError(f"a router calls itself {router_id[:MAX_ROUTER_ID]!r}; run equal versions")
        if first.hello.protocol != PROTOCOL_VERSION:
            raise ConfigError(
                f"router {router_id} speaks protocol {first.hello.protocol}, this worker "
                f"{PROTOCOL_VERSION}; run equal versions"
            )
        origin = next(self._origins)
        outbox: Outbox[worker_pb2.SessionResponse] = Outbox()
        ending = contextlib.ExitStack()  # closed once, by the reader's end or by the stream's
        ending.callback(log.info, "router %s left", router_id)
        mailbox = self._fan.open(origin, outbox)
        ending.callback(self._attempts.cancel_origin, origin)
        ending.callback(self._fan.close, origin)
        outbox.put_control(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(info=self._attempts.info())))
        log.info("router %s joined", router_id)
        reader = asyncio.create_task(_Reader(self._attempts, self._section, origin, mailbox).run(request_iterator))
        reader.add_done_callback(lambda _: ending.close())
        reporter = asyncio.create_task(self._report(outbox))
        ending.callback(reporter.cancel)
        ending.callback(reader.cancel)
        try:
            async for response in outbox:
                yield response
        finally:
            ending.close()

    async def _report(self, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        while True:
            outbox.put_control(worker_pb2.SessionResponse(report=self._attempts.report()))
            await asyncio.sleep(self._section.report_interval_s)


class _Reader:
    """Reads one session to its end, then closes its outbox, which ends the session."""

    def __init__(self, attempts: Attempts, section: SessionSection, origin: int, mailbox: Mailbox) -> None:
        self._attempts = attempts
        self._section = section
        self._origin = origin
        self._mailbox = mailbox
        self._pieces: dict[int, list[int]] = {}
        self._open_tokens = 0

    async def run(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        try:
            while True:
                async with asyncio.timeout(self._section.dead_after_s):
                    message = await anext(requests)
                self._take(message)
        except StopAsyncIteration:
            log.debug("session %d: the router closed the stream", self._origin)
        except TimeoutError:
            log.warning("session %d: no sign of life from the router, its attempts are cancelled", self._origin)
        except (TwinpoolError, ValueError) as error:
            log.warning("session %d ends: %s", self._origin, error)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            log.info("session %d: broken: %s", self._origin, error)
        finally:
            self._mailbox.outbox.close()

    def _take(self, message: worker_pb2.SessionRequest) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit)
            case "cancel":
                self._take_pieces(message.cancel.attempt_id)
                self._mailbox.unfinished.pop(message.cancel.attempt_id, None)
                self._attempts.cancel(message.cancel.attempt_id)
            case "piece":
                self._piece(message.piece)
            case "peers":
                if len(message.peers.peers) > MAX_PEERS:
                    raise ValueError(f"{len(message.peers.peers)} peers; at most {MAX_PEERS}")
                for peer in message.peers.peers:
                    if not _ADDRESS.fullmatch(peer.kv_address):
                        raise ValueError(f"{peer.worker_id!r} listens at {peer.kv_address!r}, which is no host:port")
                self._attempts.peers(self._origin, list(message.peers.peers))
            case "order":
                self._obey(message.order)
            case _:
                pass  # a heartbeat: arriving was its purpose

    def _obey(self, order: worker_pb2.Order) -> None:
        error = ""
        try:
            match order.WhichOneof("order"):
                case "drain":
                    wanted = order.drain
                    hand_over_s = wanted.hand_over_s if wanted.HasField("hand_over_s") else None
                    self._attempts.draining.order(wanted.enabled, hand_over_s)
                    self._mailbox.outbox.put_control(worker_pb2.SessionResponse(report=self._attempts.report()))
                case "flush_cache":
                    self._attempts.flush_cache()
                case "log_level":
                    set_level(order.log_level)
                case _:
                    error = "this worker does not know the order; run equal versions"
        except TwinpoolError as refused:
            error = refused.message
        log.info("order: %s", error or order.WhichOneof("order"))
        obeyed = worker_pb2.Obeyed(order_id=order.order_id, error=error)
        self._mailbox.outbox.put_control(worker_pb2.SessionResponse(obeyed=obeyed))

    def _piece(self, piece: worker_pb2.TokenPiece) -> None:
        self._open_tokens += len(piece.prompt_ids)
        if len(self._pieces) >= MAX_OPEN_PROMPTS or self._open_tokens > MAX_OPEN_TOKENS:
            raise ValueError("pieces of too many prompts came without their Submit; run equal versions")
        self._pieces.setdefault(piece.attempt_id, []).extend(piece.prompt_ids)

    def _take_pieces(self, attempt_id: int) -> list[int]:
        pieces = self._pieces.pop(attempt_id, [])
        self._open_tokens -= len(pieces)
        return pieces

    def _submit(self, submit: worker_pb2.Submit) -> None:
        prompt = [*self._take_pieces(submit.attempt_id), *submit.prompt_ids]
        request = request_from_submit(submit, prompt, self._origin, self._attempts.now())
        self._mailbox.unfinished[submit.attempt_id] = request.sampling.n
        try:
            self._attempts.submit(request, submit.prefill_worker, submit.prefill_epoch)
        except Refused as refused:
            self._mailbox.fail(submit.attempt_id, refused.code, refused.message)
