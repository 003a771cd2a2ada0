"""Encryption: who is let in, who is not, and certificates that change while a server runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, needs_openssl
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool.config import Config, TlsSection
from twinpool.errors import ConfigError
from twinpool.grpc_errors import error_from_rpc
from twinpool.proto import worker_pb2, worker_pb2_grpc
from twinpool.router.http_server import HttpServer
from twinpool.rpc import Keepalive, RpcServer, Servicer, channel
from twinpool.tls import ClientTls, ServerTls, client_tls, internal_client, internal_server, public_server

pytestmark = needs_openssl()
SERVICE = "twinpool.worker.v1.WorkerService"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
        async for _ in requests:
            yield worker_pb2.SessionResponse(report=worker_pb2.Report(steps=7))


async def start(tls: ServerTls | None, token: str | None = None, health_port: int | None = None) -> RpcServer:
    servicer = Servicer(SERVICE, lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(Echo(), server))
    return await RpcServer.start("127.0.0.1", 0, [servicer], token, tls, health_port)


async def call(port: int, tls: ClientTls | None, token: str | None = None) -> int:
    async with channel(f"127.0.0.1:{port}", token, tls) as opened:
        session = worker_pb2_grpc.WorkerServiceStub(opened).Session(timeout=5)
        await session.write(worker_pb2.SessionRequest(heartbeat=worker_pb2.Heartbeat()))
        return int((await session.read()).report.steps)


async def refused(port: int, tls: ClientTls | None, token: str | None = None) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(port, tls, token)
    return caught.value.code()


async def told(port: int, tls: ClientTls | None) -> str:
    """What a client is told whose connection is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(port, tls, "hush")
    start, _, reason = error_from_rpc(caught.value).message.partition(": ")
    assert start == f"no connection to 127.0.0.1:{port}"
    return reason


async def test_internal_planes_want_a_certificate_and_the_token(authority: Authority, tmp_path: Path) -> None:
    section = TlsSection(**authority.settings(authority.sign("worker")))
    own = internal_client(section)
    assert own is not None
    server = await start(internal_server(section), "hush")
    stranger = Authority(tmp_path / "other", "other")
    theirs = stranger.sign("theirs")
    try:
        assert await call(server.port, own, "hush") == 7
        assert await refused(server.port, own, "wrong") is grpc.StatusCode.UNAUTHENTICATED
        unavailable = grpc.StatusCode.UNAVAILABLE
        assert await refused(server.port, None, "hush") is unavailable
        assert await refused(server.port, ClientTls(own.ca), "hush") is unavailable
        assert await refused(server.port, ClientTls(own.ca, str(theirs.cert), str(theirs.key)), "hush") is unavailable
        assert await refused(server.port, ClientTls(str(stranger.ca), own.cert, own.key), "hush") is unavailable
    finally:
        await server.stop(0)


async def test_a_refused_connection_is_told_with_its_reason(authority: Authority, tmp_path: Path) -> None:
    section = TlsSection(**authority.settings(authority.sign("reasons")))
    own = internal_client(section)
    assert own is not None
    server, plain = await start(internal_server(section), "hush"), await start(None, "hush")
    stranger = Authority(tmp_path / "other", "other")
    theirs = stranger.sign("theirs")
    try:
        for shown in (None, ClientTls(own.ca), ClientTls(own.ca, str(theirs.cert), str(theirs.key))):
            assert (await told(server.port, shown)).startswith("it closes the connection; it wants TLS, or a certifi")
        assert (await told(server.port, ClientTls(str(stranger.ca)))).startswith("its certificate is of no authority")
        named = ClientTls(own.ca, own.cert, own.key, "elsewhere")
        assert (await told(server.port, named)).startswith("its certificate carries another name")
        assert (await told(plain.port, own)).startswith("it does not speak TLS")
    finally:
        await asyncio.gather(server.stop(0), plain.stop(0))


async def test_server_name_stands_for_the_address(authority: Authority) -> None:
    settings = authority.settings(authority.sign("named", "DNS:workers.twinpool"))
    server = await start(internal_server(TlsSection(**settings)))
    try:
        assert await refused(server.port, internal_client(TlsSection(**settings))) is grpc.StatusCode.UNAVAILABLE
        named = TlsSection(**settings, server_name="workers.twinpool")
        assert await call(server.port, internal_client(named)) == 7
    finally:
        await server.stop(0)


async def test_health_port_is_plain_and_serves_nothing_else(authority: Authority) -> None:
    section = TlsSection(**authority.settings(authority.sign("probed")))
    server = await start(internal_server(section), "hush", health_port=0)
    try:
        assert server.health_port
        await server.set_serving(SERVICE, True)
        async with channel(f"127.0.0.1:{server.health_port}") as opened:
            answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await refused(server.health_port, None, "hush") is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


async def test_certificates_rotate_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.sign("first"), Authority(tmp_path / "next", "next").sign("second")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes(first.cert.read_bytes())
    key.write_bytes(first.key.read_bytes())
    tls = ServerTls(str(cert), str(key))
    server = await start(tls)
    http = HttpServer(answer, "127.0.0.1", 0, tls, Keepalive())
    http.start()
    old, new = ClientTls(str(authority.ca)), ClientTls(str(tmp_path / "next" / "next.pem"))
    try:
        assert await call(server.port, old) == 7
        await get(http.port, old)
        cert.write_bytes(second.cert.read_bytes())  # half of an update: the old pair stays in force
        assert await call(server.port, old) == 7
        await get(http.port, old)
        key.write_bytes(second.key.read_bytes())
        assert await call(server.port, new) == 7
        await get(http.port, new)
        assert await refused(server.port, old) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ssl.SSLError):
            await get(http.port, old)
    finally:
        await asyncio.gather(server.stop(0), http.stop())


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def get(port: int, tls: ClientTls) -> None:
    context = ssl.create_default_context(cafile=tls.ca)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"cert": "a"}, "cert, key and ca must be set together"),
        ({"public_cert": "a"}, "public_cert and public_key must be set together"),
        ({"public_client_ca": "a"}, "public_client_ca needs TLS"),
    ],
)
def test_half_a_configuration_is_refused(section: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TlsSection(**section)


def test_who_gets_which_files() -> None:
    plain = TlsSection()
    assert (internal_client(plain), internal_server(plain), public_server(plain)) == (None, None, None)
    assert client_tls(Config()) is None
    all_three = {"cert": "c", "key": "k", "ca": "a", "server_name": "n"}
    section = TlsSection(**all_three)
    assert internal_server(section) == ServerTls("c", "k", "a")
    assert public_server(section) == ServerTls("c", "k")
    assert client_tls(Config(tls=section)) == ClientTls("a", "c", "k", "n")
    behind_proxy = TlsSection(**all_three, public=False)
    assert public_server(behind_proxy) is None
    assert client_tls(Config(tls=behind_proxy)) is None
    only_public = TlsSection(public_cert="pc", public_key="pk", public_client_ca="pa")
    assert public_server(only_public) == ServerTls("pc", "pk", "pa")
    assert internal_server(only_public) is None


async def test_unusable_files_are_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS files cannot be used"):
        await start(ServerTls(str(tmp_path / "none.pem"), str(tmp_path / "none.key")))
