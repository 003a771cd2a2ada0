"""Entry point of a prefill worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from twinpool.config import Config
from twinpool.prefill_worker.worker import PrefillWorker
from twinpool.proto import kv_pb2_grpc, worker_pb2_grpc
from twinpool.rpc import RpcServer, Servicer
from twinpool.tls import internal_server
from twinpool.worker.addresses import check_closed, check_port
from twinpool.worker.session import WorkerService
from twinpool.worker.startup import load_parts, loading_log

WORKER_SERVICE = "twinpool.worker.v1.WorkerService"
KV_SERVICE = "twinpool.kv.v1.KvService"


def run(config: Config, model_folder: Path) -> int:
    """Serves until SIGTERM; returns the exit code. Raises ConfigError if it cannot start."""
    return asyncio.run(_serve(config, model_folder))


async def _serve(config: Config, model_folder: Path) -> int:
    pool = config.prefill
    check_closed(pool.host, config.session.token, "prefill.host")
    check_port(pool.host, pool.port, "prefill.port")
    check_port(pool.host, pool.kv_port, "prefill.kv_port")
    parts = await asyncio.to_thread(load_parts, config, "prefill", pool, model_folder, loading_log())
    worker = PrefillWorker(config, parts)
    service = WorkerService(worker, worker.fan, config.session)
    token, tls = config.session.token, internal_server(config.tls)
    kv_server = await RpcServer.start(
        pool.host,
        pool.kv_port,
        [Servicer(KV_SERVICE, lambda server: kv_pb2_grpc.add_KvServiceServicer_to_server(worker.kv_service, server))],
        token,
        tls,
    )
    worker.listening(f"{pool.advertise or pool.host}:{kv_server.port}")
    server = await RpcServer.start(
        pool.host,
        pool.port,
        [Servicer(WORKER_SERVICE, lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server))],
        token,
        tls,
        pool.health_port,
    )
    worker.host.start()
    servers = [(server, WORKER_SERVICE), (kv_server, KV_SERVICE)]
    return await worker.host.serve(worker, servers, pool.drain_timeout_s, config.transport.read_timeout_s)
