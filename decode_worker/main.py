"""Entry point of a decode worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from twinpool.config import Config
from twinpool.decode_worker.worker import DecodeWorker
from twinpool.proto import worker_pb2_grpc
from twinpool.rpc import RpcServer, Servicer
from twinpool.tls import internal_server
from twinpool.worker.addresses import check_closed, check_port
from twinpool.worker.session import WorkerService
from twinpool.worker.startup import load_parts, loading_log

WORKER_SERVICE = "twinpool.worker.v1.WorkerService"


def run(config: Config, model_folder: Path) -> int:
    """Serves until SIGTERM; returns the exit code. Raises ConfigError if it cannot start."""
    return asyncio.run(_serve(config, model_folder))


async def _serve(config: Config, model_folder: Path) -> int:
    pool = config.decode
    check_closed(pool.host, config.session.token, "decode.host")
    check_port(pool.host, pool.port, "decode.port")
    parts = await asyncio.to_thread(load_parts, config, "decode", pool, model_folder, loading_log())
    worker = DecodeWorker(config, parts)
    service = WorkerService(worker, worker.fan, config.session)
    server = await RpcServer.start(
        pool.host,
        pool.port,
        [Servicer(WORKER_SERVICE, lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server))],
        config.session.token,
        internal_server(config.tls),
        pool.health_port,
    )
    worker.host.start()
    try:
        return await worker.host.serve(worker, [(server, WORKER_SERVICE)], pool.drain_timeout_s, 0.0)
    finally:
        worker.close()
