"""A process that behaves like a worker as far as the supervisor can see; run with the port and a behaviour.

serve: ready, drains at once on SIGTERM. stubborn: ready, ignores SIGTERM, has a child of its own. fail: prints an error
and exits 3 before it is ready. hang: never ready. crash-after FILE: ready; the first life makes
FILE and exits with 9.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from twinpool.parent_watch import follow_parent
from twinpool.proto import inference_pb2_grpc
from twinpool.rpc import RpcServer, Servicer

SERVICE = "twinpool.inference.v1.InfoService"


async def main(port: int, behaviour: str, argument: str) -> int:
    follow_parent()
    print(f"pid {os.getpid()}", flush=True)
    if behaviour == "fail":
        print("error: the weights are gone; put them back", file=sys.stderr, flush=True)
        return 3
    stopped = asyncio.Event()
    ignored = behaviour == "stubborn"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if ignored else stopped.set)
    if ignored:
        grandchild = subprocess.Popen(["sleep", "600"])
        print(f"pid {grandchild.pid}", flush=True)

    def add(server: object) -> None:
        inference_pb2_grpc.add_InfoServiceServicer_to_server(inference_pb2_grpc.InfoServiceServicer(), server)

    server = await RpcServer.start("127.0.0.1", port, [Servicer(SERVICE, add)])
    await server.set_serving(SERVICE, behaviour != "hang")
    if behaviour == "crash-after" and not Path(argument).exists():
        Path(argument).write_text("first life")
        asyncio.get_running_loop().call_later(0.5, os._exit, 9)
    await stopped.wait()
    await server.stop(0)
    print("drained", flush=True)
    return 0


sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")))
