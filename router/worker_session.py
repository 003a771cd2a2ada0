"""The router's lease with one worker.

Life cycle of a ``WorkerSession``, which lives as long as its address is listed, and after that until it ends:

1. connecting: gRPC dials with its own jittered back-off; nothing is polled. TLS files are read anew every few seconds.
2. ``Hello`` / ``Welcome``: the directory accepts the worker, or refuses it with both values (state ``refused``).
3. alive: the receive loop hands outputs to the sinks of their attempts and never waits for anybody. A ticker sends
   heartbeats and watches for silence: suspect after ``suspect_after_s``, dead after ``dead_after_s``.
4. ended (error, silence, stop): the sinks of all its attempts learn of it and are dropped; back to 1 after a pause,
   while the address is listed.

The session owns its channel, its outbox and the table of its attempts; whoever submits an attempt owns the sink and
takes it out with ``cancel`` or ``forget``. An output of an unknown attempt is answered with ``Cancel``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grpc
import grpc.aio

from twinpool.config import SessionSection
from twinpool.errors import ConfigError, Unavailable
from twinpool.grpc_errors import refused_connection
from twinpool.proto import worker_pb2, worker_pb2_grpc
from twinpool.router import wire
from twinpool.router.backlog import Backlog
from twinpool.router.messages import Failure, Output, Peer, Report, Submission, WorkerInfo
from twinpool.router.prefix_index import PrefixIndex
from twinpool.router.worker_view import WorkerView
from twinpool.rpc import PROTOCOL_VERSION, Dialer, Outbox

log = logging.getLogger(__name__)

State = Literal["connecting", "alive", "suspect", "dead", "refused"]

_MAX_REMEMBERED = 4096
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
_DIAL_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who this router is; ``epoch`` is drawn at start."""

    router_id: str
    epoch: int


class AttemptSink(Protocol):
    """Where a worker's news of one attempt go; called from the receive loop, must not block."""

    def on_output(self, output: Output) -> None:
        """New tokens."""

    def on_failed(self, failure: Failure) -> None:
        """The attempt ended here; the session has forgotten it."""

    def on_loaded(self) -> None:
        """Its KV is confirmed on the decode worker."""

    def on_session_end(self, reason: str, crashed: bool) -> None:
        """The worker is gone; the session has forgotten the attempt. ``crashed``: it died or hangs, nobody ended it."""


class Directory(Protocol):
    """What a session tells about itself."""

    def refusal(self, session: WorkerSession, info: WorkerInfo) -> str | None:
        """Why the worker must not be used, or None."""

    def changed(self, session: WorkerSession) -> None:
        """State, report or links changed."""


class WorkerSession:
    """One address; see the module docstring. ``listed``: whether the discovery names it, which its registry sets."""

    def __init__(
        self,
        address: str,
        config: SessionSection,
        identity: RouterIdentity,
        directory: Directory,
        dialer: Dialer,
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self.address = address
        self.state: State = "connecting"
        self.listed = True
        self.error = ""
        self.info: WorkerInfo | None = None
        self.restarts = 0
        """Times that another process has answered at the address."""
        self.report = Report()
        self._config = config
        self._identity = identity
        self._directory = directory
        self._dialer = dialer
        self._protocol = protocol
        self._outbox: Outbox[worker_pb2.SessionRequest] | None = None
        self._sinks: dict[int, AttemptSink] = {}
        self._orders: dict[int, asyncio.Future[str]] = {}
        self._order_ids = itertools.count(1)
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self._peers: frozenset[Peer] | None = None
        self.prefixes = PrefixIndex(0)
        """What the worker's prefix cache is believed to hold; begins anew with each session."""
        self._backlog = Backlog()
        self._last_heard = 0.0

    @property
    def usable(self) -> bool:
        """Whether attempts can be submitted."""
        return self.state in ("alive", "suspect")

    def view(self) -> WorkerView | None:
        """The worker as the policy sees it, or None while it is not connected."""
        if self.info is None or not self.usable:
            return None
        sent = self._backlog
        suspect = self.state == "suspect"
        return WorkerView(
            self.info, self.report, suspect, sent.requests, sent.tokens, sent.kv_tokens, self.prefixes.num_known
        )

    def submit(self, submission: Submission, sink: AttemptSink, compute_tokens: int) -> None:
        """Starts an attempt; its news go to ``sink`` until it is cancelled, forgotten, failed or the session ends.

        ``compute_tokens`` is how many tokens the worker is expected to compute before the first new one.
        """
        if self._outbox is None:
            sink.on_session_end(f"{self.address} is not connected", crashed=False)
            return
        self._sinks[submission.attempt_id] = sink
        num_tokens = len(submission.prompt_ids) + len(submission.output_ids)
        self._backlog.sent(submission.attempt_id, submission.n, compute_tokens, num_tokens)
        for message in wire.submit_messages(submission):
            self._outbox.put(message)

    def cancel(self, attempt_id: int) -> None:
        """Ends an attempt on the worker and forgets it. Unknown attempts are ignored."""
        if self._sinks.pop(attempt_id, None) is not None:
            self._backlog.ended(attempt_id)
            self._send_cancel(attempt_id)

    def forget(self, attempt_id: int) -> None:
        """Drops the sink of an attempt that the worker itself has ended."""
        self._sinks.pop(attempt_id, None)
        self._backlog.ended(attempt_id)
        self._remember(attempt_id)

    def set_peers(self, peers: frozenset[Peer]) -> None:
        """Tells a decode worker its prefill workers; sends nothing when it knows them."""
        if self._outbox is not None and peers != self._peers:
            self._peers = peers
            self._outbox.put_control(wire.peers(sorted(peers, key=lambda peer: peer.worker_id)))

    async def order(self, order: worker_pb2.Order) -> None:
        """Has the worker carry out an operator's order, whose number is set here; returns when it has.

        Raises:
            Unavailable: the worker is not connected, the session ended meanwhile, or the worker refused.
        """
        if self._outbox is None:
            raise Unavailable(
                f"{self.address} is not connected ({self.error or self.state}); twinpool status tells more"
            )
        order.order_id = next(self._order_ids)
        answer = self._orders[order.order_id] = asyncio.get_running_loop().create_future()
        self._outbox.put_control(worker_pb2.SessionRequest(order=order))
        try:
            if error := await answer:
                raise Unavailable(error)
        finally:
            self._orders.pop(order.order_id, None)

    async def run(self) -> None:
        """Keeps the session open until cancelled, or until it ends and its address is not listed any more."""
        pause_s = _MIN_PAUSE_S
        told = ""
        while self.listed:
            started = time.monotonic()
            try:
                async with self._dialer.channel(self.address) as opened:
                    # A call on a channel that is not ready fails at once and says why: a bad certificate, for example.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_DIAL_S):
                            await opened.channel_ready()
                    started = time.monotonic()
                    await self._converse(opened)
            except ConfigError as error:  # TLS files that are gone; they may come back
                self.error = error.message
            if self.state == "refused" and self.error != told:  # once, not at every try
                log.warning("no session with a worker: %s", self.error)
            told = self.error
            if time.monotonic() - started > _MAX_PAUSE_S:
                pause_s = _MIN_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _converse(self, opened: grpc.aio.Channel) -> None:
        outbox: Outbox[worker_pb2.SessionRequest] = Outbox()
        outbox.put_control(wire.hello(self._identity.router_id, self._identity.epoch, self._protocol))
        call = worker_pb2_grpc.WorkerServiceStub(opened).Session(aiter(outbox))
        tasks: list[asyncio.Task[tuple[str, bool]]] = []
        reason, crashed = "the router stops", False
        try:
            reason = await self._greet(call)
            if reason:
                return
            reason = "the router stops"
            self._outbox = outbox
            self._set_state("alive")
            tasks = [asyncio.create_task(self._receive(call)), asyncio.create_task(self._tick(outbox))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason, crashed = done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            outbox.close()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end(reason, crashed)

    async def _greet(self, call: Any) -> str:
        """Waits for ``Welcome``; returns why the worker cannot be used, or nothing."""
        try:
            async with asyncio.timeout(self._config.dead_after_s):
                message = await call.read()
        except TimeoutError:
            return f"{self.address} did not answer Hello within {self._config.dead_after_s:g} s"
        except grpc.aio.AioRpcError as error:
            closed = refused_connection(error.details() or "")
            if closed or error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
                self.state = "refused"
            return closed or f"{self.address}: {error.details() or error.code().name}"
        if message is grpc.aio.EOF or message.WhichOneof("message") != "welcome":
            return f"{self.address} did not answer Hello with Welcome; is it a twinpool worker?"
        info = wire.worker_info(message.welcome.info)
        refusal = self._refusal(info)
        if refusal:
            self.state = "refused"
            return refusal
        self.restarts += self.info is not None and self.info.epoch != info.epoch
        self.info = info
        self.report = Report(free_blocks=info.num_blocks)
        self._backlog = Backlog()
        self.prefixes = PrefixIndex(info.num_blocks)
        self._last_heard = time.monotonic()
        return ""

    def _refusal(self, info: WorkerInfo) -> str | None:
        if info.protocol != self._protocol:
            return (
                f"{info.worker_id} speaks protocol {info.protocol}, this router {self._protocol}; "
                "run the same version everywhere"
            )
        return self._directory.refusal(self, info)

    async def _receive(self, call: Any) -> tuple[str, bool]:
        """Reads until the stream ends; returns why, and whether the worker broke it instead of closing it."""
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._last_heard = time.monotonic()
                self._handle(message)
        except grpc.aio.AioRpcError as error:
            return f"{self.address}: {error.details() or error.code().name}", True
        return f"{self.address} closed the session", False

    def _handle(self, message: worker_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if self.state == "suspect":
            self._set_state("alive")
        if kind == "step":
            for output in wire.outputs(message.step):
                sink = self._sinks.get(output.attempt_id)
                if sink is not None:
                    if output.token_ids:
                        self._backlog.computed(output.attempt_id)
                    sink.on_output(output)
                elif output.finish is None and output.attempt_id not in self._cancelled:
                    self._send_cancel(output.attempt_id)
        elif kind == "report":
            self.report = wire.report(message.report)
            self._backlog.reported()
            self._directory.changed(self)
        elif kind == "loaded":
            sink = self._sinks.get(message.loaded.attempt_id)
            if sink is not None:
                sink.on_loaded()
        elif kind == "failed":
            sink = self._sinks.pop(message.failed.attempt_id, None)
            self._backlog.ended(message.failed.attempt_id)
            if sink is not None:
                sink.on_failed(wire.failure(message.failed))
        elif kind == "obeyed":
            self._answer(message.obeyed.order_id, message.obeyed.error)
        elif kind == "cache":
            self.prefixes.apply(message.cache.reset, message.cache.stored, message.cache.removed)

    async def _tick(self, outbox: Outbox[worker_pb2.SessionRequest]) -> tuple[str, bool]:
        """Sends heartbeats and watches for silence; returns when the worker is dead."""
        interval = self._config.report_interval_s
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            outbox.put_control(wire.heartbeat())
            now = time.monotonic()
            if now - due > interval:
                self._last_heard = now  # this process stood still: silence says nothing about the worker
            silence = now - self._last_heard
            if silence >= self._config.dead_after_s:
                return f"{self.address} was silent for {silence:.1f} s", True
            if silence >= self._config.suspect_after_s and self.state == "alive":
                self._set_state("suspect")

    def _set_state(self, state: State) -> None:
        self.state = state
        self.error = ""
        self._directory.changed(self)

    def _end(self, reason: str, crashed: bool) -> None:
        was_usable = self.usable
        self._outbox = None
        self._peers = None
        self._cancelled.clear()
        self.error = reason
        if self.state != "refused":
            self.state = "dead" if was_usable or self.state == "dead" else "connecting"
        self._directory.changed(self)
        for order_id in list(self._orders):
            self._answer(order_id, f"{reason}; ask again once the worker is back")
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_session_end(reason, crashed)

    def _answer(self, order_id: int, error: str) -> None:
        answer = self._orders.get(order_id)
        if answer is not None and not answer.done():
            answer.set_result(error)

    def _send_cancel(self, attempt_id: int) -> None:
        """Queued behind the attempt's own ``Submit``, which it must not overtake."""
        self._remember(attempt_id)
        if self._outbox is not None:
            self._outbox.put(wire.cancel(attempt_id))

    def _remember(self, attempt_id: int) -> None:
        """Keeps the ids of ended attempts, so that outputs already on the way are not answered one by one."""
        self._cancelled[attempt_id] = None
        if len(self._cancelled) > _MAX_REMEMBERED:
            self._cancelled.popitem(last=False)
