"""What both sides of ``bench transfer`` agree on: blocks of 64 KiB, scattered so that no two of them merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinpool.config import EngineSection
from twinpool.kv_transfer.connectors.base import Connector
from twinpool.kv_transfer.connectors.choose import make_connector
from twinpool.kv_transfer.connectors.ucx import UcxSettings
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.worker.kv_hello import KVIdentity, RankRegion
from twinpool.worker.rank_setup import choose_device, prepare_process

LAYOUT = KVLayout(num_layers=8, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
RANK = RankLayout.whole(LAYOUT)
SOURCE_ID = "source"
EPOCH = 1


@dataclass(frozen=True, slots=True)
class Side:
    """One process: its connector, the region (a flat uint8 tensor) and what it says of itself."""

    connector: Connector
    region: Any
    identity: KVIdentity


def make_side(name: str, max_blocks: int, tls: str | None) -> Side:
    """Makes a NIXL connector with room for ``max_blocks`` scattered blocks, in a process set up like a worker's.

    Raises ConnectorError if it cannot.
    """
    prepare_process(EngineSection())
    connector = make_connector("nixl", UcxSettings.for_host("127.0.0.1", tls))
    num_blocks = 2 * max_blocks + 1
    region = connector.allocate(num_blocks * RANK.block_bytes, choose_device("cpu", 0, 1))
    region.fill_(7)
    ranks = (RankRegion(0, RANK, num_blocks, connector.metadata()),)
    return Side(connector, region, KVIdentity(name, EPOCH, "bench", LAYOUT, connector.name, ranks))


def source_blocks(count: int) -> list[int]:
    """Every second block."""
    return list(range(1, 2 * count, 2))


def target_blocks(count: int) -> list[int]:
    """Every second block, other ones."""
    return list(range(2, 2 * count + 1, 2))
