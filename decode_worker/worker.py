"""The decode worker: attempts from routers, exchanges with prefill workers, one engine.

Who owns what: the engine owns requests and blocks; the import table (transfer thread) owns links and reads; this
object, on the event loop, owns the sessions with prefill workers and passes between the three. It holds no state per
attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from twinpool.config import Config
from twinpool.decode_worker.policy import DecodePolicy
from twinpool.decode_worker.prefill_link import PrefillLink
from twinpool.decode_worker.translate import first_token
from twinpool.engine import commands
from twinpool.engine.core import Engine
from twinpool.engine.no_exchange import NoExports
from twinpool.engine.request import FailureCode, Request
from twinpool.kv_transfer.events import Event, Finished, LinkDown, LinkUp, Loaded, Lost, Readable, Safe
from twinpool.kv_transfer.imports import ImportLimits, ImportTable, SourceRank
from twinpool.kv_transfer.messages import FromDecode, FromPrefill
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.proto import worker_pb2
from twinpool.rpc import Dialer
from twinpool.worker.draining import Draining
from twinpool.worker.host import Host
from twinpool.worker.kv_hello import RankRegion
from twinpool.worker.outputs import OutputFan
from twinpool.worker.session import Refused
from twinpool.worker.startup import Parts, make_engine
from twinpool.worker.translate import load_to_report

log = logging.getLogger(__name__)


class ImportsPort:
    """The engine's way to the import table: hops to the transfer thread."""

    def __init__(self, transfer: TransferThread, table: ImportTable) -> None:
        self._transfer = transfer
        self._table = table

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        """See ``engine.ports.KVImports``."""
        self._transfer.post(partial(self._table.reserved, transfer_id, first_block, tuple(block_ids)))

    def abandon(self, transfer_id: int) -> None:
        """See ``engine.ports.KVImports``."""
        self._transfer.post(partial(self._table.abandon, transfer_id))


class DecodeWorker:
    """Implements ``worker.session.Attempts``, ``prefill_link.Exchanges`` and ``worker.host.Drainable``."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._section = config.session
        self._dialer = Dialer.of(config)
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, PrefillLink] = {}
        self._peers: dict[int, dict[str, worker_pb2.Peer]] = {}
        """What each session of a router names, the one that spoke last at the end."""
        self.draining = Draining(self._loop, parts.worker_id, config.session.report_interval_s, self.hand_over)
        self.fan = OutputFan(self._loop, final_on_first=False)
        limits = ImportLimits(config.transport.read_timeout_s, config.transport.require)
        self._table = ImportTable(parts.ranks, limits, self._on_event, time.monotonic)
        self.transfer = TransferThread("transfer", self._table.poll, self._on_error)
        policy = DecodePolicy(config.decode.engine.local_prefill_budget)
        self.engine: Engine = make_engine(
            parts,
            config.decode.engine,
            policy,
            self.fan,
            exports=NoExports(),
            imports=ImportsPort(self.transfer, self._table),
        )
        self.host = Host(self.engine, parts.grammars, self.transfer, parts.close, parts.cores)

    def _on_error(self, error: Exception) -> None:
        self.host.fail(error)

    # Attempts

    def now(self) -> float:
        """See ``worker.session.Attempts``."""
        return time.monotonic()

    def submit(self, request: Request, prefill_worker: str, prefill_epoch: int) -> None:
        """See ``worker.session.Attempts``."""
        if self.draining.refuses:
            raise Refused(FailureCode.DRAINING, self.draining.reason)
        if not request.transfer_id:
            self.engine.post(commands.Submit(request))
            return
        link = self._links.get(prefill_worker)
        if link is None or link.peer.epoch != prefill_epoch or not link.state.linked:
            raise Refused(FailureCode.KV_LOST, f"{self._parts.worker_id} is not linked to {prefill_worker}")
        self.engine.post(commands.Submit(request))
        self.transfer.post(partial(self._table.open, request.transfer_id, link.key))

    def cancel(self, attempt_id: int) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.Cancel(attempt_id))

    def cancel_origin(self, origin: int) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.CancelOrigin(origin))
        if self._peers.pop(origin, None) is not None and self._peers:
            self._follow_peers()  # else the last known links stay for the next router

    def peers(self, origin: int, peers: list[worker_pb2.Peer]) -> None:
        """Links to what any router names: routers share nothing, and one may see less than another."""
        self._peers.pop(origin, None)
        self._peers[origin] = {peer.worker_id: peer for peer in peers}
        self._follow_peers()

    def _follow_peers(self) -> None:
        """Links to new peers and closes links to those that are gone or, by the latest word, have restarted."""
        wanted: dict[str, worker_pb2.Peer] = {}
        for named in self._peers.values():
            wanted |= named
        for worker_id, link in list(self._links.items()):
            if wanted.get(worker_id) != link.peer:
                del self._links[worker_id]
                link.close()
        for worker_id, peer in wanted.items():
            if worker_id not in self._links:
                self._links[worker_id] = PrefillLink(peer, self._parts.identity, self, self._section, self._dialer)

    def flush_cache(self) -> None:
        """See ``worker.session.Attempts``."""
        self.engine.post(commands.ResetPrefixCache())

    def report(self) -> worker_pb2.Report:
        """See ``worker.session.Attempts``."""
        stats = self._table.stats
        report = load_to_report(
            self.engine.load(), stats.open_exchanges, stats.quarantined_blocks, self.draining.active
        )
        report.totals.transfers, report.totals.transfers_lost = stats.loaded, stats.lost
        report.totals.transfer_bytes = stats.read_bytes
        report.totals.transfer_s, report.totals.exposed_transfer_s = stats.transfer_s, stats.exposed_transfer_s
        report.links.extend(link.state for link in self._links.values())
        return report

    def info(self) -> worker_pb2.WorkerInfo:
        """See ``worker.session.Attempts``."""
        return self._parts.info(self.engine.max_model_len, kv_address="")

    # Exchanges

    def link(self, link: PrefillLink, regions: list[RankRegion]) -> None:
        """See ``prefill_link.Exchanges``."""
        sources = [SourceRank(region.rank, region.layout, region.metadata, region.num_blocks) for region in regions]
        send = partial(self._send_soon, link)
        self.transfer.post(partial(self._table.link, link.key, link.peer.epoch, sources, send))

    def unlink(self, link: PrefillLink) -> None:
        """See ``prefill_link.Exchanges``."""
        self.transfer.post(partial(self._table.unlink, link.key))

    def receive(self, link: PrefillLink, message: FromPrefill) -> None:
        """See ``prefill_link.Exchanges``."""
        self.transfer.post(partial(self._table.receive, link.key, message, time.monotonic()))

    def _send_soon(self, link: PrefillLink, message: FromDecode) -> None:
        self._loop.call_soon_threadsafe(link.send, message)

    def _on_event(self, event: Event) -> None:
        """What the import table says, on the transfer thread."""
        match event:
            case Readable(transfer_id):
                self.engine.post(commands.RemoteReadable(transfer_id))
            case Loaded():
                first_tokens = tuple(first_token(first) for first in event.first_tokens)
                self.engine.post(
                    commands.RemoteLoaded(
                        event.transfer_id,
                        first_tokens,
                        event.transfer_s,
                        event.exposed_transfer_s,
                        event.transfer_bytes,
                        event.transport,
                        event.read_s,
                        event.sample_s,
                        event.confirm_s,
                        event.confirmed_at,
                    )
                )
            case Finished(transfer_id):
                self.engine.post(commands.RemoteFinished(transfer_id))
            case Lost(transfer_id, reason):
                self.engine.post(commands.RemoteLost(transfer_id, FailureCode.KV_LOST, reason))
            case Safe(transfer_id):
                self.engine.post(commands.DestinationSafe(transfer_id))
            case LinkUp() | LinkDown():
                self._loop.call_soon_threadsafe(self._on_link_event, event)

    def _on_link_event(self, event: LinkUp | LinkDown) -> None:
        link = next((link for link in self._links.values() if link.key == event.peer), None)
        if link is None:
            return
        if isinstance(event, LinkUp):
            link.linked(event.transport, event.gbps)
        else:
            link.broken(event.reason)

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
        """A decode worker promises no KV."""
        return False

    def close(self) -> None:
        """Ends the sessions with prefill workers."""
        for link in self._links.values():
            link.close()
        self.transfer.post(self._table.close)
