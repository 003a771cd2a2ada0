"""The router as a process: signals, ports, health."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool.config import Config, RouterSection
from twinpool.errors import ConfigError, Overloaded, Unavailable
from twinpool.router.admission import Admission
from twinpool.router.app import Router

PROGRAM = """
import sys
from pathlib import Path
from twinpool.config import Config, RouterSection
from twinpool.router.main import run
config = Config.model_validate({"router": {"grpc_port": int(sys.argv[2]), "http_port": int(sys.argv[3])}})
print("go", flush=True)
sys.exit(run(config, Path(sys.argv[1])))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_it(model_folder: Path, number: int) -> None:
    ports = [str(free_port()), str(free_port())]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(model_folder), *ports)
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(ports[1]))
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        process.send_signal(number)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("which", ["grpc_port", "http_port"])
async def test_port_in_use(model_folder: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config.model_validate({"router": {"grpc_port": 0, "http_port": 0} | {which: port}})
        with pytest.raises(ConfigError, match=str(port)) as caught:
            await Router.start(config, model_folder)
        assert "\n" not in caught.value.message


async def test_health_follows_readiness(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster:
        health = health_pb2_grpc.HealthStub(cluster.channel)

        async def status(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        assert await status("") == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service="twinpool.inference.v1.InferenceService"))
        async with asyncio.timeout(5):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            await cluster.workers[1].kill()
            while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
        watch.cancel()


async def test_admission_counts_and_drains() -> None:
    now = [0.0]
    admission = Admission(RouterSection(max_queued=2), clock=lambda: now[0])
    first, second = admission.admit(), admission.admit()
    with pytest.raises(Overloaded):
        admission.admit()
    first.release()
    first.release()
    assert admission.in_flight == 1
    assert not await admission.drain(0)
    with pytest.raises(Unavailable):
        admission.admit()
    second.release()
    assert await admission.drain(0)
