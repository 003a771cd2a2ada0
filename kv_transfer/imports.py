"""Decode side of the exchange: reads announced KV and has it confirmed before anybody uses it.

Life cycle of an exchange (all on the transfer thread):

1. ``open``: OPENING; ``Open`` goes to the prefill worker of a link that is up.
2. The first segment: READABLE, event ``Readable``. The engine answers ``reserved`` (READING) or stays silent.
3. ``poll`` reads the segments, as they come, into the reserved blocks: only blocks with index ≥ ``first_block``.
4. ``Final`` is there and every (block, layer, source rank) is read: ``Done`` is sent (CONFIRMING).
5. ``Released(valid=True)``: event ``Loaded``, and the exchange is over. The blocks belong to the request all along.

Early ends: ``Finished`` (every choice ended with its first token), ``Lost`` (Gone, Released(valid=False), link down, KV
announced incompletely), ``abandon``. Then reads already posted may still land, so the exchange drains (its blocks are
in quarantine) until they have ended or the link is closed; after that ``Safe`` returns the blocks to the engine.

Life cycle of a link: ``link`` connects one ``Link`` per source rank and warms it up with real reads of the null block
into our null block, which also measures it; ``LinkUp``. A failed read, a read over ``read_timeout_s`` or ``unlink``
closes it, which destroys the agent: the only fence against a hung peer. ``LinkDown``; its owner may ``link`` again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.kv_transfer.connectors.base import Connector
from twinpool.kv_transfer.events import Event
from twinpool.kv_transfer.layout import RankLayout
from twinpool.kv_transfer.messages import FromDecode, FromPrefill


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of a prefill worker, from its Hello. ``rank`` is its number in Segment and ConnectorMessage."""

    rank: int
    layout: RankLayout
    metadata: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Bounds in seconds. ``require``: links whose transport does not contain this are refused."""

    read_timeout_s: float = 20.0
    require: str | None = None


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
    """All exchanges and links of one decode rank; see the module. Every method but ``stats``: transfer thread only.

    ``target`` is what this rank holds, ``num_blocks`` blocks of it. ``emit`` gets ``events``; it must only enqueue.
    """

    def __init__(
        self,
        connector: Connector,
        target: RankLayout,
        num_blocks: int,
        limits: ImportLimits,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None: ...

    def link(self, peer: str, epoch: int, sources: Sequence[SourceRank], send: Callable[[FromDecode], None]) -> None:
        """Connects to ``peer`` and warms up; ends in LinkUp or LinkDown. Replaces an earlier link of the peer."""

    def unlink(self, peer: str, reason: str = "the session ended") -> None:
        """Closes the peer's link: its exchanges are lost, their blocks safe. Idempotent."""

    def open(self, transfer_id: int, peer: str) -> None:
        """Joins an exchange; Lost at once if the peer is not linked."""

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        """From block index ``first_block`` on, KV is to be read into ``block_ids``; empty: nothing is read."""

    def abandon(self, transfer_id: int) -> None:
        """The engine no longer wants the exchange; Safe follows if it was told ``reserved``."""

    def receive(self, peer: str, message: FromPrefill) -> None:
        """Takes a message of the peer's session."""

    def poll(self, now: float) -> float | None:
        """Drives reads and bounds; returns when to be called again, None if nothing is pending."""

    def close(self) -> None:
        """Closes all links. Idempotent."""

    @property
    def stats(self) -> ImportStats:
        """A snapshot; any thread."""
