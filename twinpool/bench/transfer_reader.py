"""The reader of ``bench transfer``: a decode worker's sessions, import table and connector, without an engine.

For each size it takes turns: a raw NIXL read, then an exchange (Open, Segment, read, Done, Final, Released) of the same
blocks from the same source. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from twinpool.bench.transfer_shape import EPOCH, RANK, SOURCE_ID, Side, make_side, source_blocks, target_blocks
from twinpool.config import SessionSection
from twinpool.decode_worker.prefill_link import PrefillLink
from twinpool.kv_transfer.connectors.nixl_raw import RawReader
from twinpool.kv_transfer.events import Event, LinkDown, LinkUp, Loaded, Lost, Readable
from twinpool.kv_transfer.imports import ImportLimits, ImportTable, SourceRank
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import FromDecode, FromPrefill
from twinpool.kv_transfer.read_planner import ReadPlanner
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.proto import worker_pb2
from twinpool.rpc import Dialer
from twinpool.worker.kv_hello import RankRegion

LINK_TIMEOUT_S = 30.0
PAUSE_S = 0.01
"""Before each read, raw or exchange: the source has done by then what it was told, and both begin with cold caches."""


class Reader:
    """Implements ``prefill_link.Exchanges``; one exchange at a time."""

    def __init__(self, side: Side, orders: Any) -> None:
        self._side = side
        self._orders = orders
        self._loop = asyncio.get_running_loop()
        self._table = ImportTable([RankEndpoint(0, RANK, side.connector)], ImportLimits(), self._on_event)
        self._transfer = TransferThread("transfer", self._table.poll, self._on_error)
        self._transfer.start()
        self._wanted = 0
        self._numbers = iter(range(1, 1 << 30))
        self._done: asyncio.Future[Loaded] = self._loop.create_future()
        self.linked: asyncio.Future[LinkUp] = self._loop.create_future()
        self.metadata = b""

    def order(self, **values: Any) -> None:
        """Tells the source what to do."""
        self._orders.write(json.dumps(values) + "\n")
        self._orders.flush()

    async def exchange(self, link: PrefillLink, num_blocks: int) -> tuple[float, Loaded]:
        """One exchange: seconds from Open to the confirmed copy, as its caller sees it, and what it measured itself."""
        transfer_id = next(self._numbers)
        self._wanted, self._done = num_blocks, self._loop.create_future()
        self.order(hold=[transfer_id, num_blocks])
        await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        self._transfer.post(partial(self._table.open, transfer_id, link.key))
        loaded = await self._done
        return time.perf_counter() - began, loaded

    def stop(self) -> None:
        """Ends reads and links."""
        self._transfer.post(self._table.close)
        self._transfer.stop()
        self._side.connector.close()

    def link(self, link: PrefillLink, regions: list[RankRegion]) -> None:
        """See ``prefill_link.Exchanges``."""
        self.metadata = regions[0].metadata
        sources = [SourceRank(region.rank, region.layout, region.metadata, region.num_blocks) for region in regions]
        send = partial(self._send_soon, link)
        self._transfer.post(partial(self._table.link, link.key, link.peer.epoch, sources, send))

    def unlink(self, link: PrefillLink) -> None:
        """See ``prefill_link.Exchanges``."""
        self._transfer.post(partial(self._table.unlink, link.key))

    def receive(self, link: PrefillLink, message: FromPrefill) -> None:
        """See ``prefill_link.Exchanges``."""
        self._transfer.post(partial(self._table.receive, link.key, message))

    def _send_soon(self, link: PrefillLink, message: FromDecode) -> None:
        self._loop.call_soon_threadsafe(link.send, message)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Readable):
            blocks = target_blocks(self._wanted)
            self._transfer.post(partial(self._table.reserved, event.transfer_id, 0, blocks))
        else:
            self._loop.call_soon_threadsafe(self._tell, event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, LinkUp) and not self.linked.done():
            self.linked.set_result(event)
        elif isinstance(event, Loaded):
            self._done.set_result(event)
        elif isinstance(event, Lost) and not self._done.done():
            self._done.set_exception(RuntimeError(event.reason))
        elif isinstance(event, LinkDown) and not self.linked.done():
            self.linked.set_exception(RuntimeError(event.reason))

    def _on_error(self, error: Exception) -> None:
        print(f"bench transfer, reader: {error}", file=sys.stderr, flush=True)


async def measure(sizes: Sequence[int], rounds: int, side: Side, source: subprocess.Popen[str]) -> dict[str, Any]:
    """Measures ``rounds`` pairs per size (blocks) against a running source."""
    assert source.stdin is not None
    assert source.stdout is not None
    port = json.loads(await asyncio.to_thread(source.stdout.readline))["port"]
    reader = Reader(side, source.stdin)
    peer = worker_pb2.Peer(worker_id=SOURCE_ID, epoch=EPOCH, kv_address=f"127.0.0.1:{port}")
    link = PrefillLink(peer, side.identity, reader, SessionSection(), Dialer())
    try:
        up = await asyncio.wait_for(reader.linked, LINK_TIMEOUT_S)
        raw = RawReader(side.region, reader.metadata)
        return {
            "transport": up.transport,
            "warm_up_gigabytes_per_second": round(up.gbps, 2),
            "block_bytes": RANK.block_bytes,
            "sizes": [await _size(reader, link, raw, size, rounds) for size in sizes],
        }
    finally:
        link.close()
        await asyncio.sleep(0.1)  # the session's end reaches the source before it is stopped
        reader.stop()


async def _size(reader: Reader, link: PrefillLink, raw: RawReader, num_blocks: int, rounds: int) -> dict[str, Any]:
    planner = ReadPlanner(RANK, RANK)
    table = planner.plan(source_blocks(num_blocks), target_blocks(num_blocks), 0, RANK.num_layers)
    num_bytes = num_blocks * RANK.block_bytes
    raw_s, read_s, whole_s = [], [], []
    for number in range(rounds + 1):
        reader.order(spin=True)
        await asyncio.sleep(PAUSE_S)
        seconds = await asyncio.to_thread(raw.read, table)
        reader.order(spin=False)
        whole, loaded = await reader.exchange(link, num_blocks)
        if loaded.transfer_bytes != num_bytes:
            raise RuntimeError(f"{loaded.transfer_bytes} bytes came, not {num_bytes}")
        if number:  # the first pair touches memory for the first time
            raw_s.append(seconds)
            read_s.append(loaded.read_s)
            whole_s.append(whole)
    figures = Size(num_blocks, num_bytes, _rate(num_bytes, raw_s), _rate(num_bytes, read_s), _rate(num_bytes, whole_s))
    return {**dataclasses.asdict(figures), "share_of_raw": round(figures.exchange_read / figures.raw, 3)}


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Gigabytes per second, medians: a raw read, the reads of an exchange, and an exchange from Open to its end."""

    blocks: int
    bytes: int
    raw: float
    exchange_read: float
    exchange_whole: float


def _rate(num_bytes: int, seconds: Sequence[float]) -> float:
    return round(num_bytes / statistics.median(seconds) / 1e9, 3)


def main(counts: Sequence[int], rounds: int, tls: str | None) -> None:
    """Starts a source, measures, stops the source."""
    side = make_side("reader", max(counts), tls)
    command = [sys.executable, "-P", "-m", "twinpool.bench.transfer_source", str(max(counts)), tls or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        print(json.dumps(asyncio.run(measure(counts, rounds, side, source))))


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1].split(",")], int(sys.argv[2]), sys.argv[3] or None)
