"""The prefill worker: attempts from routers, holds for decode workers, one engine.

Who owns what: the engine owns requests and blocks; the hold table says who may read them until when; this object passes
between routers, table and engine. It holds no state per attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from twinpool.config import Config
from twinpool.engine import commands
from twinpool.engine.commands import FirstToken
from twinpool.engine.core import Engine
from twinpool.engine.no_exchange import NoImports
from twinpool.engine.ports import ReadyEvent
from twinpool.engine.request import FailureCode, Request
from twinpool.kv_transfer.holds import HoldLimits, HoldTable
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.prefill_worker.kv_service import KvService, PeerOutboxes
from twinpool.prefill_worker.policy import PrefillPolicy
from twinpool.prefill_worker.translate import firsts
from twinpool.proto import worker_pb2
from twinpool.worker.draining import Draining
from twinpool.worker.host import Host
from twinpool.worker.outputs import OutputFan
from twinpool.worker.session import Refused
from twinpool.worker.startup import Parts, make_engine
from twinpool.worker.translate import load_to_report

log = logging.getLogger(__name__)


class ExportsPort:
    """The engine's way to the hold table: translates first tokens, nothing else."""

    def __init__(self, holds: HoldTable) -> None:
        self._holds = holds

    def begin(self, transfer_id: int, num_blocks: int) -> None:
        """See ``engine.ports.KVExports``."""
        self._holds.begin(transfer_id, num_blocks)

    def announce(
        self,
        transfer_id: int,
        first_block: int,
        block_ids: Sequence[int],
        layer_start: int,
        layer_end: int,
        event: ReadyEvent,
        rank: int,
    ) -> None:
        """See ``engine.ports.KVExports``."""
        self._holds.announce(transfer_id, first_block, block_ids, layer_start, layer_end, event, rank)

    def final(self, transfer_id: int, num_tokens: int, first_tokens: Sequence[FirstToken]) -> None:
        """See ``engine.ports.KVExports``."""
        self._holds.final(transfer_id, num_tokens, firsts(first_tokens))

    def refuse(self, transfer_id: int, reason: str) -> None:
        """See ``engine.ports.KVExports``."""
        self._holds.refuse(transfer_id, reason)

    def revoke(self, transfer_id: int, reason: str) -> None:
        """See ``engine.ports.KVExports``."""
        self._holds.revoke(transfer_id, reason)


class PrefillWorker:
    """Implements ``worker.session.Attempts`` and ``worker.host.Drainable``."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._parts = parts
        self._kv_address = ""
        loop = asyncio.get_running_loop()
        self.draining = Draining(loop, parts.worker_id, config.session.report_interval_s, self.hand_over)
        self.fan = OutputFan(loop, final_on_first=True)
        self._outboxes = PeerOutboxes(loop)
        limits = HoldLimits(config.transport.open_timeout_s, config.transport.hold_timeout_s)
        self.transfer = TransferThread("transfer", self._tick, self._on_error)
        self._holds = HoldTable(limits, self._outboxes.send, self._on_ended, self.transfer.wake)
        self.engine: Engine = make_engine(
            parts,
            config.prefill.engine,
            PrefillPolicy(),
            self.fan,
            exports=ExportsPort(self._holds),
            imports=NoImports(),
        )
        self.host = Host(self.engine, parts.grammars, self.transfer, parts.close, parts.cores)
        self.kv_service = KvService(
            parts.identity, self._holds, self._outboxes, parts.ranks, self.transfer, config.session
        )

    def listening(self, kv_address: str) -> None:
        """The kv.v1 service is reachable at ``kv_address``."""
        self._kv_address = kv_address

    def _tick(self, now: float) -> float | None:
        """One turn of the transfer thread: proves and expires holds; pumps only while somebody may be reading."""
        due = self._holds.poll(now)
        pumped = [item.endpoint for item in self._parts.ranks if item.endpoint.pumped]
        interval = self._holds.pump_interval(now)
        if interval is None or not pumped:
            return due
        for endpoint in pumped:
            endpoint.progress()
        return now + interval if due is None else min(due, now + interval)

    def _on_ended(self, transfer_id: int) -> None:
        self.engine.post(commands.HoldEnded(transfer_id))

    def _on_error(self, error: Exception) -> None:
        self.host.fail(error)

    # Attempts

    def now(self) -> float:
        """See ``worker.session.Attempts``."""
        return time.monotonic()

    def submit(self, request: Request, prefill_worker: str, prefill_epoch: int) -> None:
        """See ``worker.session.Attempts``."""
        if self.draining.refuses:
            self._holds.refuse(request.transfer_id, self.draining.reason)
            raise Refused(FailureCode.DRAINING, self.draining.reason)
        if not request.transfer_id:
            raise Refused(
                FailureCode.INVALID, f"{self._parts.worker_id} only prefills; send whole requests to a decode worker"
            )
        timeout_s = None if request.deadline is None else max(0.0, request.deadline - self.now())
        self._holds.expect(request.transfer_id, timeout_s)
        self.engine.post(commands.Submit(request))

    def cancel(self, attempt_id: int) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.Cancel(attempt_id))

    def cancel_origin(self, origin: int) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.CancelOrigin(origin))

    def peers(self, origin: int, peers: list[worker_pb2.Peer]) -> None:
        """Prefill workers dial nobody."""

    def flush_cache(self) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.ResetPrefixCache())

    def report(self) -> worker_pb2.Report:
        """See ``worker.session.Attempts``."""
        stats = self._holds.stats
        report = load_to_report(self.engine.load(), stats.open, 0, self.draining.active)
        report.totals.holds_released, report.totals.holds_revoked = stats.released, stats.revoked
        return report

    def info(self) -> worker_pb2.WorkerInfo:
        """See ``worker.session.Attempts``."""
        return self._parts.info(self.engine.max_model_len, self._kv_address)

    # Draining

    def hand_over(self) -> None:
        """See ``worker.host.Drainable``."""
        self.fan.hand_over(self.cancel, f"{self._parts.worker_id} has drained")

    @property
    def busy(self) -> bool:
        """See ``worker.host.Drainable``."""
        return self.fan.unfinished > 0

    @property
    def promised(self) -> bool:
        """Whether a hold is open."""
        return self._holds.stats.open > 0

    def close(self) -> None:
        """Nothing of its own to end: sessions end with their server."""
