"""Decode side of the exchange: reads announced KV and has it confirmed before anybody uses it.

Life cycle of an exchange (all on the transfer thread):

1. ``open``: OPENING; ``Open`` goes to the prefill worker of a link that is up.
2. The first segment: READABLE, event ``Readable``. The engine answers ``reserved`` (READING) or stays silent.
3. ``poll`` reads the segments, as they come, into the reserved blocks: only blocks with index ≥ ``first_block``.
4. Every (block, layer, source rank) of the reserved blocks is read: ``Done`` is sent (CONFIRMING), usually while the
   prefill worker still samples, so that its answer comes together with ``Final``.
5. ``Final`` and ``Released(valid=True)``: event ``Loaded``, and the exchange is over. The blocks belong to the request
   all along.

Early ends: ``Finished`` (every choice ended with its first token), ``Lost`` (Gone, Released(valid=False), link down, KV
announced incompletely), ``abandon``. Then reads already posted may still land, so the exchange drains (its blocks are
in quarantine) until they have ended or the link is closed; after that ``Safe`` returns the blocks to the engine.

Life cycle of a link: ``link`` connects and warms up (see ``links``); ``LinkUp``. A failed read, a read over
``read_timeout_s`` or ``unlink`` closes it, which destroys the agent: the only fence against a hung peer. ``LinkDown``;
its owner may ``link`` again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from twinpool.kv_transfer.connectors.base import ConnectorError, ReadState
from twinpool.kv_transfer.events import Event, Finished, LinkDown, LinkUp, Loaded, Lost, Readable, Safe
from twinpool.kv_transfer.exchange import Exchange, ExchangeState
from twinpool.kv_transfer.links import PeerLink, RankEndpoint, SourceRank
from twinpool.kv_transfer.messages import (
    Abandon,
    ConnectorMessage,
    Done,
    Final,
    FromDecode,
    FromPrefill,
    Open,
    Released,
    Segment,
)

__all__ = ["ImportLimits", "ImportStats", "ImportTable", "SourceRank"]

POLL_INTERVAL_S = 0.0002
"""Between polls of reads in flight."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """``require``: links whose transport does not contain this are refused. ``warm_up_bytes``: see ``links``."""

    read_timeout_s: float = 20.0
    require: str | None = None
    warm_up_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class ImportStats:
    """What is open now, and totals since start. Seconds as in ``events.Loaded``."""

    open_exchanges: int = 0
    quarantined_blocks: int = 0
    loaded: int = 0
    lost: int = 0
    read_bytes: int = 0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0


class ImportTable:
    """All exchanges and links of one decode worker; see the module. Every method but ``stats``: transfer thread only.

    ``targets`` are the worker's ranks: an exchange is complete when each has read what it holds. ``emit`` takes events
    and must only enqueue.
    """

    def __init__(
        self,
        targets: Sequence[RankEndpoint],
        limits: ImportLimits,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = targets
        self._limits = limits
        self._emit = emit
        self._clock = clock
        self._links: dict[str, PeerLink] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._draining: dict[int, Exchange] = {}
        self._totals = ImportStats()
        self._stats = self._totals

    # Links

    def link(self, peer: str, epoch: int, sources: Sequence[SourceRank], send: Callable[[FromDecode], None]) -> None:
        """Connects to ``peer`` and warms up; ends in LinkUp or LinkDown. Replaces an earlier link of the peer."""
        self.unlink(peer, "replaced by a new link")
        try:
            link = PeerLink(peer, epoch, self._targets, sources, send, self._limits.warm_up_bytes)
        except ConnectorError as error:
            self._emit(LinkDown(peer, epoch, str(error)))
            return
        self._links[peer] = link
        link.pump(True)

    def unlink(self, peer: str, reason: str = "the session with the prefill worker ended") -> None:
        """Closes the peer's link: its exchanges are lost, their blocks safe. Idempotent. Sends nothing."""
        link = self._links.get(peer)
        if link is not None:
            self._drop_link(link, reason)

    # Exchanges

    def open(self, transfer_id: int, peer: str) -> None:
        """Joins an exchange; Lost at once if the peer is not linked."""
        link = self._links.get(peer)
        if link is None or not link.up:
            self._emit(Lost(transfer_id, f"not linked to prefill worker {peer}"))
            return
        self._exchanges[transfer_id] = Exchange(transfer_id, link)
        link.send(Open(transfer_id))

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        """From block index ``first_block`` on, KV is to be read into ``block_ids``; empty: nothing is read.

        If the exchange has ended meanwhile, Safe follows at once.
        """
        exchange = self._exchanges.get(transfer_id)
        if exchange is None:
            if transfer_id not in self._draining:
                self._emit(Safe(transfer_id))
            return
        if exchange.block_ids is not None:
            raise ValueError(f"exchange {transfer_id:x} was reserved twice")
        exchange.first_block = first_block
        exchange.block_ids = tuple(block_ids)
        exchange.state = ExchangeState.READING
        self._start_reads(exchange, self._clock())

    def abandon(self, transfer_id: int) -> None:
        """The engine no longer wants the exchange; Safe follows if it was told ``reserved``. Idempotent."""
        exchange = self._exchanges.get(transfer_id)
        if exchange is not None:
            self._end(exchange, leave=True)

    def receive(self, peer: str, message: FromPrefill, at: float | None = None) -> None:
        """Takes a message of the peer's session. What belongs to no exchange with this peer is ignored.

        ``at`` is when it came, on our clock, if it had to wait for this thread: a copy may run inside a post.
        """
        came = self._clock() if at is None else at
        if isinstance(message, ConnectorMessage):
            link = self._links.get(peer)
            if link is not None:
                try:
                    link.deliver(message)
                except ConnectorError as error:
                    self._break_link(link, str(error))
            return
        exchange = self._exchanges.get(message.transfer_id)
        if exchange is None or exchange.link.peer != peer:
            return
        if isinstance(message, Segment):
            exchange.unread.append(message)
            exchange.segment_at = came
            self._readable(exchange, came)
        elif isinstance(message, Final):
            self._final(exchange, message, came)
        elif isinstance(message, Released):
            self._released(exchange, message)
        else:
            self._lose(exchange, f"prefill worker {peer}: {message.reason}", leave=False)

    def poll(self, now: float) -> float | None:
        """Drives warm-ups, reads and bounds; returns when to be called again, None if nothing is pending."""
        for link in [link for link in self._links.values() if not link.up]:
            self._warm(link)
        for exchange in list(self._exchanges.values()):
            if exchange.state is ExchangeState.READING:
                self._start_reads(exchange, now)
        for exchange in [*self._exchanges.values(), *self._draining.values()]:
            if exchange.reads:
                self._poll_reads(exchange, now)
        for exchange in list(self._exchanges.values()):
            self._advance(exchange, now)
        self._publish()
        busy = any(not link.up for link in self._links.values()) or any(
            exchange.reads for exchange in [*self._exchanges.values(), *self._draining.values()]
        )
        if busy:
            return now + POLL_INTERVAL_S
        return min((e.confirm_by for e in self._exchanges.values() if e.confirm_by is not None), default=None)

    def close(self) -> None:
        """Closes all links. Idempotent."""
        for link in list(self._links.values()):
            self._drop_link(link, "the decode worker stops")
        self._publish()

    @property
    def stats(self) -> ImportStats:
        """A snapshot as of the last poll; any thread."""
        return self._stats

    # Steps of an exchange

    def _readable(self, exchange: Exchange, came: float) -> None:
        if exchange.state is ExchangeState.OPENING:
            exchange.state = ExchangeState.READABLE
            exchange.readable_at = came
            self._emit(Readable(exchange.transfer_id))

    def _final(self, exchange: Exchange, final: Final, came: float) -> None:
        if all(first.finish for first in final.first_tokens):
            self._emit(Finished(exchange.transfer_id))
            self._end(exchange, leave=False)
            return
        exchange.final = final
        exchange.final_at = came
        self._readable(exchange, came)
        if exchange.state is ExchangeState.CONFIRMING:
            self._check_complete(exchange)
            exchange.confirm_by = self._clock() + self._limits.read_timeout_s
        else:
            self._advance(exchange, self._clock())

    def _start_reads(self, exchange: Exchange, now: float) -> None:
        """Reads what is announced and not yet read; then perhaps that was all."""
        if exchange.unread:
            if not exchange.reads:
                exchange.reading_at = now
            try:
                for pair, table in exchange.take_tables().items():
                    pending = exchange.link.read(pair, table, now)
                    exchange.reads.append(pending)
                    exchange.read_bytes += pending.read.num_bytes
            except ConnectorError as error:
                self._break_link(exchange.link, str(error))
                return
        self._advance(exchange, now)

    def _poll_reads(self, exchange: Exchange, now: float) -> None:
        for pending in list(exchange.reads):
            state = exchange.link.poll(pending)
            if state is ReadState.FAILED:
                self._break_link(exchange.link, "a read failed: the prefill worker is gone or unreachable")
                return
            if state is ReadState.DONE:
                exchange.reads.remove(pending)
                if not exchange.reads:
                    exchange.read_s += self._clock() - exchange.reading_at
            elif now - pending.posted_at > self._limits.read_timeout_s:
                bound = f"{self._limits.read_timeout_s:g} s (transport.read_timeout_s)"
                self._break_link(exchange.link, f"a read took over {bound}")
                return
        if not exchange.reads and exchange.state is ExchangeState.DRAINING:
            self._drained(exchange)

    def _advance(self, exchange: Exchange, now: float) -> None:
        """Sends Done when everything is read, and gives up when no answer to it comes."""
        if exchange.confirm_by is not None and now >= exchange.confirm_by:
            self._lose(exchange, "the prefill worker did not confirm in time", leave=True)
        if exchange.state is not ExchangeState.READING or exchange.reads or exchange.unread:
            return
        if exchange.final is None:
            if exchange.unannounced():
                return
        elif not self._check_complete(exchange):
            return
        else:
            exchange.confirm_by = now + self._limits.read_timeout_s
        exchange.state = ExchangeState.CONFIRMING
        exchange.done_at = self._clock()
        exchange.link.send(Done(exchange.transfer_id))

    def _check_complete(self, exchange: Exchange) -> bool:
        """Whether all that Final promises was announced; ends the exchange if not."""
        missing = exchange.missing(self._targets[0].layout.layout.block_size)
        if missing:
            self._lose(exchange, f"prefill worker {exchange.link.peer} announced incomplete KV: {missing}", leave=True)
        return not missing

    def _released(self, exchange: Exchange, released: Released) -> None:
        if not released.valid or exchange.state is not ExchangeState.CONFIRMING or exchange.final is None:
            self._lose(exchange, "the prefill worker did not confirm the copy", leave=False)
            return
        del self._exchanges[exchange.transfer_id]
        now = self._clock()
        transfer_s, exposed_s = now - exchange.readable_at, now - exchange.final_at
        self._totals = replace(
            self._totals,
            loaded=self._totals.loaded + 1,
            read_bytes=self._totals.read_bytes + exchange.read_bytes,
            transfer_s=self._totals.transfer_s + transfer_s,
            exposed_transfer_s=self._totals.exposed_transfer_s + exposed_s,
        )
        self._emit(
            Loaded(
                transfer_id=exchange.transfer_id,
                first_tokens=exchange.final.first_tokens,
                transfer_s=transfer_s,
                exposed_transfer_s=exposed_s,
                transfer_bytes=exchange.read_bytes,
                transport=exchange.link.transport if exchange.read_bytes else "",
                read_s=exchange.read_s,
                sample_s=exchange.final_at - exchange.segment_at if exchange.segment_at else 0.0,
                confirm_s=now - max(exchange.done_at, exchange.final_at),
                confirmed_at=now,
            )
        )

    # Ends

    def _lose(self, exchange: Exchange, reason: str, leave: bool) -> None:
        self._totals = replace(self._totals, lost=self._totals.lost + 1)
        self._emit(Lost(exchange.transfer_id, reason))
        self._end(exchange, leave)

    def _end(self, exchange: Exchange, leave: bool) -> None:
        """Takes an exchange out of the table; it drains if reads may still land. ``leave`` tells the prefill worker."""
        del self._exchanges[exchange.transfer_id]
        exchange.unread.clear()
        exchange.state = ExchangeState.DRAINING
        if exchange.reads:
            self._draining[exchange.transfer_id] = exchange
            # Before Abandon, so that the source never sees a reason to stop making progress.
            exchange.link.pump(True)
        elif exchange.block_ids is not None:
            self._emit(Safe(exchange.transfer_id))
        if leave:
            exchange.link.send(Abandon(exchange.transfer_id))

    def _drained(self, exchange: Exchange) -> None:
        del self._draining[exchange.transfer_id]
        self._emit(Safe(exchange.transfer_id))
        if not any(other.link is exchange.link for other in self._draining.values()):
            exchange.link.pump(False)

    # Links, internally

    def _warm(self, link: PeerLink) -> None:
        try:
            link.warm(self._clock, self._limits.read_timeout_s)
            if not link.up:
                return
            required = self._limits.require
            if required is not None and required not in link.transport:
                raise ConnectorError(
                    f"transport.require wants {required!r}, but the link uses {link.transport}; "
                    "fix transport.ucx_tls and the network, or lower the requirement"
                )
        except ConnectorError as error:
            self._break_link(link, str(error))
            return
        link.pump(False)
        self._emit(LinkUp(link.peer, link.epoch, link.transport, link.gbps))

    def _break_link(self, link: PeerLink, reason: str) -> None:
        """The link is of no use any more, but the session may live: the prefill worker is told."""
        if self._links.get(link.peer) is not link:
            return
        left = [exchange.transfer_id for exchange in self._of(link, self._exchanges.values())]
        self._drop_link(link, reason)
        for transfer_id in left:
            link.send(Abandon(transfer_id))
        link.pump(False)

    def _drop_link(self, link: PeerLink, reason: str) -> None:
        """Closes the link first; then nothing can land, and all its exchanges are lost and safe."""
        link.close()
        del self._links[link.peer]
        for exchange in self._of(link, self._exchanges.values()):
            exchange.reads.clear()
            self._lose(exchange, reason, leave=False)
        for exchange in self._of(link, self._draining.values()):
            exchange.reads.clear()
            del self._draining[exchange.transfer_id]
            self._emit(Safe(exchange.transfer_id))
        self._emit(LinkDown(link.peer, link.epoch, reason))

    def _of(self, link: PeerLink, exchanges: Iterable[Exchange]) -> list[Exchange]:
        return [exchange for exchange in exchanges if exchange.link is link]

    def _publish(self) -> None:
        self._stats = replace(
            self._totals,
            open_exchanges=len(self._exchanges),
            quarantined_blocks=sum(len(exchange.block_ids or ()) for exchange in self._draining.values()),
        )
