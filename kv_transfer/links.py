"""A decode rank's link to one prefill worker: a connector link per source rank, warmed up before use.

1. ``PeerLink`` connects to every source rank that holds something of ours.
2. WARMING: ``warm`` reads the source's null block into our null block, which nobody uses: once to connect, then
   ``ROUNDS`` times to measure. ``Open(0)`` asks the source to keep making progress meanwhile.
3. UP: exchanges read through ``read`` and ``poll``.
4. ``close`` destroys the connector links; after that no read of this link can land. Its owner drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, CopyRange, Link, Read, ReadState
from twinpool.kv_transfer.layout import RankLayout
from twinpool.kv_transfer.messages import LINK_TRANSFER_ID, ConnectorMessage, Done, FromDecode, Open
from twinpool.kv_transfer.plan import plan_reads, shared_layers

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of a prefill worker, from its Hello. ``rank`` is its number in Segment and ConnectorMessage."""

    rank: int
    layout: RankLayout
    metadata: bytes
    num_blocks: int


@dataclass(slots=True)
class PendingRead:
    """A read in flight through the link of source rank ``rank``."""

    rank: int
    read: Read
    posted_at: float


class PeerLink:
    """See the module. Transfer thread only."""

    def __init__(
        self,
        peer: str,
        epoch: int,
        connector: Connector,
        target: RankLayout,
        sources: Sequence[SourceRank],
        send: Callable[[FromDecode], None],
        warm_up_bytes: int,
    ) -> None:
        """Connects to all ranks; ``warm_up_bytes`` is about what one round reads.

        Raises ConnectorError, with nothing left open, if a rank cannot be reached.
        """
        self.peer = peer
        self.epoch = epoch
        self.send = send
        self.up = False
        self.gbps = 0.0
        self._target = target
        self._pumped = connector.pumped
        self._pumping = False
        self._warm_up_bytes = warm_up_bytes
        self.sources = {source.rank: source for source in needed_ranks(target, sources)}
        self._links: dict[int, Link] = {}
        self._rounds_left = ROUNDS + 1
        self._round: list[PendingRead] = []
        self._round_bytes = 0
        self._round_started = 0.0
        try:
            for source in self.sources.values():
                self._links[source.rank] = connector.connect(source.metadata, self._sender(source.rank))
        except ConnectorError:
            self.close()
            raise

    @property
    def transport(self) -> str:
        """Connector and transport; several, if ranks differ."""
        return "+".join(sorted({link.transport for link in self._links.values()}))

    def layers(self, rank: int) -> range:
        """Layers that source rank ``rank`` has for us; empty if it has none."""
        source = self.sources.get(rank)
        return shared_layers(source.layout, self._target) if source is not None else range(0)

    def plan(
        self, rank: int, source_blocks: Sequence[int], target_blocks: Sequence[int], layer_start: int, layer_end: int
    ) -> list[CopyRange]:
        """Plans the copy of layers of some blocks from one source rank."""
        layout = self.sources[rank].layout
        return plan_reads(layout, self._target, source_blocks, target_blocks, layer_start, layer_end)

    def read(self, rank: int, ranges: Sequence[CopyRange], now: float) -> PendingRead:
        """Starts a read. Raises ConnectorError if the source is gone."""
        return PendingRead(rank, self._links[rank].read(ranges), now)

    def poll(self, pending: PendingRead) -> ReadState:
        """Progress and state of a read."""
        return self._links[pending.rank].poll(pending.read)

    def deliver(self, message: ConnectorMessage) -> None:
        """Hands a payload to the link of its rank."""
        if message.rank in self._links:
            self._links[message.rank].deliver(message.payload)

    def pump(self, wanted: bool) -> None:
        """Tells the source whether reads are pending that it knows nothing of."""
        if self._pumped and wanted != self._pumping:
            self._pumping = wanted
            self.send(Open(LINK_TRANSFER_ID) if wanted else Done(LINK_TRANSFER_ID))

    def warm(self, clock: Callable[[], float], timeout_s: float) -> None:
        """Drives the warm-up; ``up`` is true, and ``gbps`` known, when it is over. ConnectorError if it failed."""
        while not self.up:
            for pending in list(self._round):
                state = self.poll(pending)
                if state is ReadState.FAILED:
                    raise ConnectorError("the warm-up read failed: the source is gone or unreachable")
                if state is ReadState.DONE:
                    self._round.remove(pending)
            now = clock()
            if self._round:
                if now - self._round_started > timeout_s:
                    raise ConnectorError(
                        f"the warm-up read took over {timeout_s:g} s (transport.read_timeout_s); "
                        "check the network between the workers"
                    )
                return
            if self._round_bytes and self._rounds_left < ROUNDS and now > self._round_started:
                self.gbps = max(self.gbps, self._round_bytes / (now - self._round_started) / 1e9)
            if self._rounds_left == 0:
                self.up = True
                return
            self._start_round(clock)

    def close(self) -> None:
        """Destroys the connector links: when it returns, nothing of this link can land. Idempotent."""
        for link in self._links.values():
            link.close()

    def _start_round(self, clock: Callable[[], float]) -> None:
        connecting = self._rounds_left == ROUNDS + 1
        self._rounds_left -= 1
        self._round_bytes = 0
        self._round_started = clock()
        for rank, source in self.sources.items():
            ranges = self.plan(rank, [0], [0], 0, source.layout.layout.num_layers)
            block_bytes = sum(item.length for item in ranges)
            repeat = 1 if connecting else max(1, min(64, self._warm_up_bytes // block_bytes))
            self._round.append(self.read(rank, ranges * repeat, self._round_started))
            self._round_bytes += block_bytes * repeat

    def _sender(self, rank: int) -> Callable[[bytes], None]:
        return lambda payload: self.send(ConnectorMessage(rank, payload))


def needed_ranks(target: RankLayout, sources: Sequence[SourceRank]) -> list[SourceRank]:
    """Picks source ranks that together hold all that ``target`` holds; a replica of another rank is left out.

    Raises ConnectorError, naming both values, if layouts differ or something is held by nobody.
    """
    missing = {
        (layer, head)
        for layer in range(target.layer_start, target.layer_end)
        for head in range(target.head_start, target.head_end)
    }
    picked: list[SourceRank] = []
    for source in sources:
        layout = source.layout
        if layout.layout != target.layout:
            raise ConnectorError(
                f"KV layouts differ: source {layout.layout.text}, target {target.layout.text}; "
                "run both pools with one model and one engine.block_size"
            )
        held = {
            (layer, head)
            for layer in shared_layers(layout, target)
            for head in range(layout.head_start, layout.head_end)
        }
        if held & missing:
            picked.append(source)
            missing -= held
    if missing:
        layer, head = min(missing)
        raise ConnectorError(f"no source rank holds layer {layer}, KV head {head}; its Hello describes too few ranks")
    return picked
