"""Clients that ask for a stream and read nothing of it: they cost the router little, for a while, and nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import grpc
import httpx
import pytest

from twinpool.proto import inference_pb2 as pb
from twinpool.proto import inference_pb2_grpc
from twinpool.router import flow

LENGTH = 400_000
"""Tokens: far more than sockets and gRPC buffer before they make the router wait."""
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def chatty(cluster: Any) -> None:
    for worker in cluster.workers:
        worker.max_model_len = 2 * LENGTH
        worker.num_blocks = LENGTH


async def check_others(cluster: Any) -> None:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=20) as client:
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        for _ in range(5):
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 4


async def check_cancelled(cluster: Any) -> None:
    """The stalled request ended before its answer did."""
    async with asyncio.timeout(60):
        await cluster.router.admission._idle.wait()
    await cluster.eventually(lambda: bool(cluster.workers[1].cancels))


async def test_an_http_client_that_reads_nothing(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "STALL_S", 1.0)
    async with make_cluster("hello", setup=chatty) as cluster:
        await cluster.router.wait_ready()
        body = json.dumps({"prompt": "x", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", cluster.router.http_port))
            client.sendall(head + body)
            await cluster.eventually(lambda: cluster.router.admission.in_flight == 1)
            (connection,) = cluster.router._http._server.server_state.connections
            await check_others(cluster)
            await check_cancelled(cluster)
            assert connection.transport.get_write_buffer_size() < 1 << 20


async def test_a_grpc_client_that_reads_nothing(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "STALL_S", 1.0)
    async with make_cluster("hello", setup=chatty) as cluster:
        await cluster.router.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.grpc_port}", options=NARROW) as channel:
            stopping = pb.Stopping(max_tokens=LENGTH, ignore_eos=True)
            request = pb.GenerateRequest(text="x", stopping=stopping)
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
            assert (await call.read()).text
            await check_others(cluster)
            await check_cancelled(cluster)
