"""The source of ``bench transfer``: the KV service, hold table and connector of a prefill worker, without an engine.

Orders come as lines of JSON on standard input, from the reader that started it: ``{"hold": [transfer_id, num_blocks]}``
promises blocks and announces them at once; ``{"spin": true}`` makes progress without pause, for raw reads, until
``{"spin": false}``. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading

from twinpool.bench.transfer_shape import LAYOUT, RANK, SOURCE_ID, make_side, source_blocks
from twinpool.config import SessionSection
from twinpool.kv_transfer.hold import HoldLimits
from twinpool.kv_transfer.holds import HoldTable
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.kv_transfer.messages import First
from twinpool.kv_transfer.transfer_thread import TransferThread
from twinpool.prefill_worker.kv_service import KvService, PeerOutboxes
from twinpool.proto import kv_pb2_grpc
from twinpool.rpc import RpcServer, Servicer

KV_SERVICE = "twinpool.kv.v1.KvService"


class Written:
    """An event that has happened."""

    def query(self) -> bool:
        """True."""
        return True


class Source:
    """See the module."""

    def __init__(self, max_blocks: int, tls: str | None) -> None:
        self._side = make_side(SOURCE_ID, max_blocks, tls)
        self._outboxes = PeerOutboxes(asyncio.get_running_loop())
        self._transfer = TransferThread("transfer", self._tick, self._on_error)
        limits = HoldLimits(open_timeout_s=600, hold_timeout_s=600)
        self._holds = HoldTable(limits, self._outboxes.send, lambda transfer_id: None, self._transfer.wake)
        self._spinning = threading.Event()
        ranks = [RankEndpoint(0, RANK, self._side.connector)]
        self.service = KvService(
            self._side.identity, self._holds, self._outboxes, ranks, self._transfer, SessionSection()
        )
        self._transfer.start()

    def _tick(self, now: float) -> float | None:
        due = self._holds.poll(now)
        while self._spinning.is_set():
            self._side.connector.progress()
        interval = self._holds.pump_interval(now)
        if interval is None or not self._side.connector.pumped:
            return due
        self._side.connector.progress()
        return now + interval if due is None else min(due, now + interval)

    def _on_error(self, error: Exception) -> None:
        print(f"bench transfer, source: {error}", file=sys.stderr, flush=True)

    def obey(self, line: str) -> None:
        """Does what one line asks for."""
        order = json.loads(line)
        if "spin" in order:
            (self._spinning.set if order["spin"] else self._spinning.clear)()
            self._transfer.wake()
        else:
            transfer_id, num_blocks = order["hold"]
            self._holds.begin(transfer_id, num_blocks)
            self._holds.announce(transfer_id, 0, source_blocks(num_blocks), 0, LAYOUT.num_layers, Written())
            self._holds.final(transfer_id, num_blocks * LAYOUT.block_size, [First(0, 0)])


async def serve(max_blocks: int, tls: str | None) -> None:
    """Prints the port and the connector's metadata, then obeys until standard input ends."""
    source = Source(max_blocks, tls)
    server = await RpcServer.start(
        "127.0.0.1",
        0,
        [Servicer(KV_SERVICE, lambda server: kv_pb2_grpc.add_KvServiceServicer_to_server(source.service, server))],
    )
    print(json.dumps({"port": server.port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        source.obey(line)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2] or None))
