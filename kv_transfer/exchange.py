"""One exchange on the decode side: what was announced, where it goes, and what has been read."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from twinpool.kv_transfer.copy_table import CopyTable, joined
from twinpool.kv_transfer.links import Pair, PeerLink, PendingRead
from twinpool.kv_transfer.messages import Final, Segment
from twinpool.kv_transfer.segments import merge_segments


class ExchangeState(enum.Enum):
    """See ``imports``. DRAINING: over for everybody else, but a read may still land."""

    OPENING = "opening"
    READABLE = "readable"
    READING = "reading"
    CONFIRMING = "confirming"
    DRAINING = "draining"


@dataclass(slots=True)
class Exchange:
    """``block_ids`` is None until the engine has reserved; times are of the table's clock.

    ``unread`` are announced segments without a read yet; ``covered`` has, per pair of ranks and reserved block, the
    layers for which a read was started, as a bit mask. ``read_s`` counts the seconds with a read in flight, the present
    one (since ``reading_at``) not yet.
    """

    transfer_id: int
    link: PeerLink
    state: ExchangeState = ExchangeState.OPENING
    first_block: int = 0
    block_ids: tuple[int, ...] | None = None
    unread: list[Segment] = field(default_factory=list)
    reads: list[PendingRead] = field(default_factory=list)
    covered: dict[Pair, list[int]] = field(default_factory=dict)
    final: Final | None = None
    readable_at: float = 0.0
    segment_at: float = 0.0
    final_at: float = 0.0
    done_at: float = 0.0
    reading_at: float = 0.0
    read_s: float = 0.0
    confirm_by: float | None = None
    read_bytes: int = 0

    def take_tables(self) -> dict[Pair, CopyTable]:
        """Turns all unread segments into what to copy, per pair of ranks, and counts them as covered.

        Only blocks with an index in ``[first_block, first_block + len(block_ids))`` are read.
        """
        assert self.block_ids is not None
        segments, self.unread = self.unread, []
        segments.sort(key=lambda segment: (segment.rank, segment.layer_start, segment.layer_end, segment.first_block))
        tables: dict[Pair, list[CopyTable]] = {}
        last_block = self.first_block + len(self.block_ids)
        for segment in merge_segments(segments):
            start = max(segment.first_block, self.first_block)
            end = min(segment.first_block + len(segment.block_ids), last_block)
            if start >= end:
                continue
            source_blocks = segment.block_ids[start - segment.first_block : end - segment.first_block]
            target_blocks = self.block_ids[start - self.first_block : end - self.first_block]
            for pair in self.link.pairs:
                layers = self.link.layers(pair)
                low, high = max(segment.layer_start, layers.start), min(segment.layer_end, layers.stop)
                if pair.source != segment.rank or low >= high:
                    continue
                mask = (1 << high) - (1 << low)
                covered = self.covered.setdefault(pair, [0] * len(self.block_ids))
                at, stop = start - self.first_block, end - self.first_block
                covered[at:stop] = [layers_so_far | mask for layers_so_far in covered[at:stop]]
                tables.setdefault(pair, []).append(self.link.plan(pair, source_blocks, target_blocks, low, high))
        return {pair: joined(parts) for pair, parts in tables.items()}

    def missing(self, block_size: int) -> str:
        """What Final promised and no segment announced, or what was not reserved; "" if nothing. After Final only."""
        assert self.final is not None
        assert self.block_ids is not None
        if not self.block_ids:
            return ""
        num_blocks = -(-self.final.num_tokens // block_size)
        reserved = self.first_block + len(self.block_ids)
        if reserved < num_blocks:
            return f"{num_blocks} blocks were announced, {reserved} reserved"
        return self._uncovered(num_blocks)

    def unannounced(self) -> str:
        """What of the reserved blocks no segment announced so far; "" if nothing."""
        assert self.block_ids is not None
        return self._uncovered(self.first_block + len(self.block_ids))

    def _uncovered(self, num_blocks: int) -> str:
        for pair in self.link.pairs:
            layers = self.link.layers(pair)
            wanted = (1 << layers.stop) - (1 << layers.start)
            # From the end: segments come in the order of blocks.
            covered = self.covered.get(pair, [0] * len(self.block_ids or ()))
            for block in range(num_blocks - 1, self.first_block - 1, -1):
                if covered[block - self.first_block] != wanted:
                    return f"block {block} of rank {pair.source} was not announced completely"
        return ""
