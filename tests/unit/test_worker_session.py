"""The worker's end of a router session, when the router is there no more."""

from __future__ import annotations

import asyncio
from typing import Any

from twinpool.config import SessionSection
from twinpool.proto import worker_pb2, worker_pb2_grpc
from twinpool.rpc import PROTOCOL_VERSION, RpcServer, Servicer, channel
from twinpool.worker.outputs import OutputFan
from twinpool.worker.session import WorkerService


class Attempts:
    """What a session needs of a worker to begin and to end."""

    def __init__(self) -> None:
        self.cancelled: asyncio.Queue[int] = asyncio.Queue()

    def info(self) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(worker_id="decode-0")

    def report(self) -> worker_pb2.Report:
        link = worker_pb2.Linked(error="x" * (1 << 20))  # soon more than gRPC takes for one who does not read
        return worker_pb2.Report(links=[link])

    def cancel_origin(self, origin: int) -> None:
        self.cancelled.put_nowait(origin)


async def test_a_silent_router_that_reads_nothing_loses_its_attempts() -> None:
    """Responses are stuck in gRPC's flow control, as they are on a half-open connection."""
    attempts: Any = Attempts()
    fan = OutputFan(asyncio.get_running_loop(), final_on_first=False)
    section = SessionSection(report_interval_s=0.01, suspect_after_s=0.1, dead_after_s=1.0)
    service = WorkerService(attempts, fan, section)
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    server = await RpcServer.start("127.0.0.1", 0, [Servicer("worker", lambda server: add(service, server))])
    try:
        async with channel(f"127.0.0.1:{server.port}") as opened:
            session = worker_pb2_grpc.WorkerServiceStub(opened).Session()
            hello = worker_pb2.Hello(router_id="router", protocol=PROTOCOL_VERSION)
            await session.write(worker_pb2.SessionRequest(hello=hello))
            assert (await session.read()).WhichOneof("message") == "welcome"
            assert await asyncio.wait_for(attempts.cancelled.get(), 20) == 1
            assert not session.done(), "the call itself has not ended"
            session.cancel()
        assert attempts.cancelled.empty(), "it ended once"
    finally:
        await server.stop(0)
