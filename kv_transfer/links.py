"""A decode worker's link to one prefill worker: a connector link per pair of ranks, warmed up before use.

1. ``PeerLink`` connects each of our ranks to the source ranks that together hold what it needs (``Pair``).
2. WARMING: ``warm`` reads the source's null block into our null block, which nobody uses: once to connect, then
   ``ROUNDS`` times to measure. ``Open(0)`` asks the source to keep making progress meanwhile.
3. UP: exchanges read through ``read`` and ``poll``.
4. ``close`` destroys the connector links; after that no read of this link can land. Its owner drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from twinpool.kv_transfer.connectors.base import ConnectorError, Endpoint, Link, Read, ReadState
from twinpool.kv_transfer.copy_table import CopyTable
from twinpool.kv_transfer.layout import RankLayout
from twinpool.kv_transfer.messages import LINK_TRANSFER_ID, ConnectorMessage, Done, FromDecode, Open
from twinpool.kv_transfer.read_planner import ReadPlanner, shared_layers

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class SourceRank:
    """One rank of a prefill worker, from its Hello. ``rank`` is its number in Segment and ConnectorMessage."""

    rank: int
    layout: RankLayout
    metadata: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """One rank of our own worker: what it holds of each block, and its end of all links."""

    rank: int
    layout: RankLayout
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Pair:
    """Rank ``target`` of ours reads from rank ``source`` of the prefill worker."""

    source: int
    target: int


@dataclass(slots=True)
class PendingRead:
    """A read in flight through the link of ``pair``."""

    pair: Pair
    read: Read
    posted_at: float


class PeerLink:
    """See the module. Transfer thread only."""

    def __init__(
        self,
        peer: str,
        epoch: int,
        targets: Sequence[RankEndpoint],
        sources: Sequence[SourceRank],
        send: Callable[[FromDecode], None],
        warm_up_bytes: int,
    ) -> None:
        """Connects all pairs; ``warm_up_bytes`` is about what one round reads of a pair.

        Raises ConnectorError, with nothing left open, if a rank cannot be reached.
        """
        self.peer = peer
        self.epoch = epoch
        self.send = send
        self.up = False
        self.gbps = 0.0
        self._targets = {target.rank: target for target in targets}
        self._pumped = any(target.endpoint.pumped for target in targets)
        self._pumping = False
        self._warm_up_bytes = warm_up_bytes
        self._sources = {source.rank: source for source in sources}
        self._links: dict[Pair, Link] = {}
        self._planners: dict[Pair, ReadPlanner] = {}
        self._rounds_left = ROUNDS + 1
        self._round: list[PendingRead] = []
        self._round_bytes = 0
        self._round_started = 0.0
        try:
            for target in targets:
                for source in needed_ranks(target.layout, _rotated(sources, target.rank)):
                    pair = Pair(source.rank, target.rank)
                    self._planners[pair] = ReadPlanner(source.layout, target.layout)
                    self._links[pair] = target.endpoint.connect(source.metadata, self._sender(pair))
        except ConnectorError:
            self.close()
            raise

    @property
    def transport(self) -> str:
        """Connector and transport; several, if ranks differ."""
        return "+".join(sorted({link.transport for link in self._links.values()}))

    @property
    def pairs(self) -> Collection[Pair]:
        """The pairs that together read everything that our ranks hold."""
        return self._links.keys()

    def layers(self, pair: Pair) -> range:
        """Layers that are read by ``pair``."""
        return self._planners[pair].layers

    def plan(
        self, pair: Pair, source_blocks: Sequence[int], target_blocks: Sequence[int], layer_start: int, layer_end: int
    ) -> CopyTable:
        """Plans the copy of layers of some blocks."""
        return self._planners[pair].plan(source_blocks, target_blocks, layer_start, layer_end)

    def read(self, pair: Pair, table: CopyTable, now: float) -> PendingRead:
        """Starts a read. Raises ConnectorError if the source is gone."""
        return PendingRead(pair, self._links[pair].read(table), now)

    def poll(self, pending: PendingRead) -> ReadState:
        """Progress and state of a read."""
        return self._links[pending.pair].poll(pending.read)

    def deliver(self, message: ConnectorMessage) -> None:
        """Hands a payload to the link of its pair."""
        link = self._links.get(Pair(message.source, message.target))
        if link is not None:
            link.deliver(message.payload)

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
        for pair in self._links:
            layers = self.layers(pair)
            table = self.plan(pair, [0], [0], layers.start, layers.stop)
            block_bytes = table.num_bytes
            repeat = 1 if connecting else max(1, min(64, self._warm_up_bytes // block_bytes))
            self._round.append(self.read(pair, table.repeat(repeat), self._round_started))
            self._round_bytes += block_bytes * repeat

    def _sender(self, pair: Pair) -> Callable[[bytes], None]:
        return lambda payload: self.send(ConnectorMessage(pair.source, pair.target, payload))


def _rotated(sources: Sequence[SourceRank], first: int) -> list[SourceRank]:
    """``sources`` from another beginning, so that our ranks spread over replicas that hold the same heads."""
    first %= len(sources) or 1
    return [*sources[first:], *sources[:first]]


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
