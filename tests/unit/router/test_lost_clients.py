"""Clients that are gone without a word, and connections that never speak: what they hold becomes free."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from black_hole import Proxy, vanish
from certificates import Authority, needs_openssl

from twinpool.proto import inference_pb2 as pb
from twinpool.proto import inference_pb2_grpc
from twinpool.router import http_server
from twinpool.tls import ClientTls

QUICK = {"keepalive_s": 1.0, "keepalive_timeout_s": 1.0}
LOST_S = 20.0


def never_ends(cluster: Any) -> None:
    for worker in cluster.workers:
        worker.pause_after = 3


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    proxy = Proxy(("127.0.0.1", 0), ("127.0.0.1", port))
    try:
        yield proxy
    finally:
        proxy.close()


async def check_freed(cluster: Any) -> None:
    """Slots in the router are free, and the workers were told; nothing else would end these requests."""
    async with asyncio.timeout(LOST_S):
        while cluster.router.admission.in_flight:
            await asyncio.sleep(0.05)
    await cluster.eventually(lambda: bool(cluster.workers[1].cancels))


def request_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


async def test_a_grpc_client_vanishes(make_cluster: Any) -> None:
    async with make_cluster("hello world", setup=never_ends, **QUICK) as cluster:
        await cluster.router.wait_ready()
        with proxy_to(cluster.router.grpc_port) as proxy:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"))
                assert (await call.read()).text.startswith("h")
                await cluster.workers[1].paused.wait()
                proxy.cut()
                await check_freed(cluster)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_http_client_vanishes(make_cluster: Any, stream: bool) -> None:
    async with make_cluster("hello world", setup=never_ends, **QUICK) as cluster:
        await cluster.router.wait_ready()
        with socket.create_connection(("127.0.0.1", cluster.router.http_port)) as client:
            client.sendall(request_bytes({"prompt": "x", "stream": stream}))
            await cluster.workers[1].paused.wait()
            vanish(client)
            await check_freed(cluster)


async def test_an_http_client_vanishes_while_tokens_flow(make_cluster: Any) -> None:
    """Nothing is acknowledged, so that no keepalive probe is ever sent."""
    async with make_cluster("hello world", setup=never_ends, **QUICK) as cluster:
        await cluster.router.wait_ready()
        with socket.create_connection(("127.0.0.1", cluster.router.http_port)) as client:
            client.sendall(request_bytes({"prompt": "x", "stream": True}))
            await cluster.workers[1].paused.wait()
            vanish(client)
            cluster.workers[1].pause_after = 6
            cluster.workers[1].paused.clear()
            cluster.workers[1].go.set()
            cluster.workers[1].go.clear()
            await cluster.workers[1].paused.wait()
            await check_freed(cluster)


@needs_openssl()
async def test_clients_vanish_behind_tls(make_cluster: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("router")
    public = {"public_cert": str(pair.cert), "public_key": str(pair.key)}
    tls = ClientTls(str(authority.ca))
    async with make_cluster("hello", setup=never_ends, sections={"tls": public}, **QUICK) as cluster:
        await cluster.router.wait_ready()
        with proxy_to(cluster.router.grpc_port) as rpc, proxy_to(cluster.router.http_port) as http:
            async with grpc.aio.secure_channel(f"127.0.0.1:{rpc.port}", tls.credentials()) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"))
                assert (await call.read()).text.startswith("h")
                rpc.cut()
                await check_freed(cluster)
            cluster.workers[1].cancels.clear()
            trust = ssl.create_default_context(cafile=str(authority.ca))
            async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{http.port}", verify=trust) as client:
                asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                await cluster.eventually(lambda: cluster.router.admission.in_flight == 1)
                http.cut()
                await check_freed(cluster)
                asking.cancel()


@contextlib.asynccontextmanager
async def opened(port: int, said: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        yield reader
    finally:
        writer.close()


async def check_closed(port: int, said: bytes) -> None:
    """Says so much and no more; the router ends the connection."""
    async with opened(port, said) as reader, asyncio.timeout(LOST_S):
        with contextlib.suppress(ConnectionError):
            await reader.read()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("said", [b"", HEAD])
async def test_http_connections_that_say_too_little_are_closed(make_cluster: Any, said: bytes) -> None:
    async with make_cluster("hello", opening_timeout_s=0.3) as cluster:
        await cluster.router.wait_ready()
        await check_closed(cluster.router.http_port, said)


async def test_a_second_request_that_is_not_said_whole(make_cluster: Any) -> None:
    async with make_cluster("hello", opening_timeout_s=0.3) as cluster:
        await cluster.router.wait_ready()
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET")
        async with asyncio.timeout(LOST_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n"])
async def test_grpc_connections_that_say_too_little_are_closed(make_cluster: Any, said: bytes) -> None:
    async with make_cluster("hello", opening_timeout_s=0.3) as cluster:
        await cluster.router.wait_ready()
        await check_closed(cluster.router.grpc_port, said)


async def test_a_grpc_connection_without_calls_that_vanishes_is_closed(make_cluster: Any) -> None:
    async with make_cluster("hello", **QUICK) as cluster:
        port = cluster.router.grpc_port
        with proxy_to(port) as proxy:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
                await inference_pb2_grpc.InfoServiceStub(channel).ListModels(pb.ListModelsRequest())
                (sock,) = proxy.outgoing
                assert peers_of(port, sock)
                proxy.cut()
                async with asyncio.timeout(LOST_S):
                    while peers_of(port, sock):
                        await asyncio.sleep(0.1)


def peers_of(port: int, client: socket.socket) -> list[str]:
    """The kernel's lines of the server's end of ``client``."""
    ends = [f"{number:04X}" for number in (port, client.getsockname()[1])]
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = (line.split() for table in tables for line in table)
    return [row[3] for row in rows if [row[1][-4:], row[2][-4:]] == ends and row[3] == "01"]


async def test_the_oldest_silent_connection_gives_way(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_OPENING", 5)
    async with make_cluster("hello") as cluster, contextlib.AsyncExitStack() as stack:
        await cluster.router.wait_ready()
        port = cluster.router.http_port
        silent = [await stack.enter_async_context(opened(port, b"")) for _ in range(20)]
        async with asyncio.timeout(LOST_S), httpx.AsyncClient(base_url=cluster.http_url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 200
            for reader in silent[:15]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
        assert sum(reader.at_eof() or reader.exception() is not None for reader in silent) == 16
