"""Operators' orders: to whom the router passes them, what it waits for, and who may give them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from twinpool.proto import admin_pb2, admin_pb2_grpc
from twinpool.rpc import channel

TOKEN = "secret"


@contextlib.asynccontextmanager
async def admin(cluster: Any, token: str | None = None) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    async with channel(f"127.0.0.1:{cluster.router.admin_port}", token) as opened:
        yield admin_pb2_grpc.AdminServiceStub(opened)


async def test_orders_reach_their_workers(make_cluster: Any) -> None:
    async with make_cluster("x", admin_port=0) as cluster, admin(cluster) as stub:
        await cluster.router.wait_ready()
        prefill, decode = cluster.workers
        answer = await stub.Drain(admin_pb2.DrainRequest(worker_id="decode-0", hand_over_s=3, wait=True))
        assert answer.requests == 0
        assert cluster.router.registry.not_ready_reason
        await stub.Drain(admin_pb2.DrainRequest(worker_id="decode-0", undo=True))
        assert not cluster.router.registry.not_ready_reason
        first, second = (order.drain for order in decode.orders)
        assert (first.enabled, first.hand_over_s, second.enabled) == (True, 3, False)
        assert not second.HasField("hand_over_s")
        flushed = await stub.FlushCache(admin_pb2.FlushCacheRequest())
        assert list(flushed.worker_ids) == ["decode-0", "prefill-0"]
        assert [order.WhichOneof("order") for order in prefill.orders] == ["flush_cache"]
        with pytest.raises(grpc.aio.AioRpcError, match=r"no worker 'decode-7'.*decode-0, prefill-0"):
            await stub.Drain(admin_pb2.DrainRequest(worker_id="decode-7"))


async def test_drain_waits_for_what_still_runs(make_cluster: Any) -> None:
    async with make_cluster("x", admin_port=0) as cluster, admin(cluster) as stub:
        await cluster.router.wait_ready()
        decode = cluster.workers[1]
        decode.running = 1
        waiting = asyncio.ensure_future(stub.Drain(admin_pb2.DrainRequest(worker_id="decode-0", wait=True)))
        await cluster.eventually(lambda: decode.draining)
        assert (await stub.Drain(admin_pb2.DrainRequest(worker_id="decode-0"))).requests == 1
        assert not waiting.done()
        decode.running = 0
        async with asyncio.timeout(10):
            assert (await waiting).requests == 0


async def test_an_order_ends_with_its_session(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].deaf = True

    async with make_cluster("x", admin_port=0, setup=setup) as cluster, admin(cluster) as stub:
        await cluster.router.wait_ready()
        waiting = asyncio.ensure_future(stub.FlushCache(admin_pb2.FlushCacheRequest()))
        await cluster.eventually(lambda: bool(cluster.workers[1].orders))
        await cluster.workers[1].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_log_levels(make_cluster: Any) -> None:
    logger = logging.getLogger("twinpool")
    before = logger.level
    try:
        async with make_cluster("x", admin_port=0) as cluster, admin(cluster) as stub:
            await cluster.router.wait_ready()
            answer = await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="debug"))
            assert list(answer.names) == ["router", "decode-0", "prefill-0"]
            assert logger.level == logging.DEBUG
            assert [order.log_level for order in cluster.workers[0].orders] == ["debug"]
            answer = await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="error", target="router"))
            assert list(answer.names) == ["router"]
            assert (logger.level, len(cluster.workers[0].orders)) == (logging.ERROR, 1)
            with pytest.raises(grpc.aio.AioRpcError, match="debug, info, warning, error"):
                await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="loud", target="router"))
    finally:
        logger.setLevel(before)


async def test_only_the_cluster_token_opens_it_and_no_public_port_does(make_cluster: Any) -> None:
    sections = {"session": {"token": TOKEN}}
    async with make_cluster("x", admin_port=0, sections=sections) as cluster:
        flush = admin_pb2.FlushCacheRequest()
        for token in (None, "wrong"):
            async with admin(cluster, token) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.FlushCache(flush)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with admin(cluster, TOKEN) as stub:
            await stub.FlushCache(flush)
        async with channel(f"127.0.0.1:{cluster.router.grpc_port}", TOKEN) as public:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminServiceStub(public).FlushCache(flush)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_no_port_unless_configured(make_cluster: Any) -> None:
    async with make_cluster("x") as cluster:
        assert cluster.router.admin_port is None
