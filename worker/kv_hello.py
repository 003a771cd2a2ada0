"""Hello of kv.v1: what a worker says of its KV, and the comparison that either side makes before any payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.errors import ConfigError
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.proto import kv_pb2
from twinpool.rpc import PROTOCOL_VERSION

MAX_RANKS = 1024
MAX_WORKER_ID = 256


@dataclass(frozen=True, slots=True)
class RankRegion:
    """The KV region of one rank and its connector's description of it."""

    rank: int
    layout: RankLayout
    num_blocks: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """One side of an exchange session."""

    worker_id: str
    epoch: int
    revision: str
    layout: KVLayout
    connector: str
    regions: tuple[RankRegion, ...]

    def to_proto(self) -> kv_pb2.Hello:
        """The wire form."""
        return kv_pb2.Hello(
            worker_id=self.worker_id,
            epoch=self.epoch,
            protocol=PROTOCOL_VERSION,
            revision=self.revision,
            layout=self.layout.fingerprint,
            layout_text=self.layout.text,
            connector=self.connector,
            ranks=[
                kv_pb2.RankInfo(
                    rank=region.rank,
                    layer_start=region.layout.layer_start,
                    layer_end=region.layout.layer_end,
                    head_start=region.layout.head_start,
                    head_end=region.layout.head_end,
                    num_blocks=region.num_blocks,
                    metadata=region.metadata,
                )
                for region in self.regions
            ],
        )

    def check(self, peer: kv_pb2.Hello) -> None:
        """Compares ``peer`` with this side.

        Raises:
            ConfigError: they cannot exchange KV; names what differs, with both values.
        """
        if not peer.worker_id.isprintable() or len(peer.worker_id) > MAX_WORKER_ID:
            raise ConfigError(f"a worker calls itself {peer.worker_id[:MAX_WORKER_ID]!r}; set its worker_id")
        differences = (
            ("protocol", str(PROTOCOL_VERSION), str(peer.protocol)),
            ("model revision", self.revision, peer.revision),
            ("KV layout", self.layout.text, peer.layout_text),
            ("connector", self.connector, peer.connector),
        )
        for what, ours, theirs in differences:
            if ours != theirs:
                raise ConfigError(
                    f"{self.worker_id} and {peer.worker_id} cannot exchange KV: {what} is {ours} here and {theirs} "
                    "there; start both pools with the same model, block size, dtype and connector"
                )
        ranks = [rank.rank for rank in peer.ranks]
        if not ranks or len(ranks) > MAX_RANKS or sorted(ranks) != list(range(len(ranks))):
            raise ConfigError(f"{peer.worker_id} describes ranks {ranks[:MAX_RANKS]}; run equal versions")
        for rank in peer.ranks:
            layers, heads = (rank.layer_start, rank.layer_end), (rank.head_start, rank.head_end)
            inside = layers[1] <= self.layout.num_layers and heads[1] <= self.layout.num_kv_heads
            if not (inside and layers[0] < layers[1] and heads[0] < heads[1] and 0 < rank.num_blocks < 2**31):
                raise ConfigError(
                    f"rank {rank.rank} of {peer.worker_id} holds layers {layers}, heads {heads} and "
                    f"{rank.num_blocks} blocks of {self.layout.text}; run equal versions"
                )

    def peer_regions(self, peer: kv_pb2.Hello) -> Sequence[RankRegion]:
        """The regions of a peer that ``check`` accepted."""
        return [
            RankRegion(
                rank.rank,
                RankLayout(self.layout, rank.layer_start, rank.layer_end, rank.head_start, rank.head_end),
                rank.num_blocks,
                rank.metadata,
            )
            for rank in peer.ranks
        ]
