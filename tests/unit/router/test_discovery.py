"""Workers come and go while the router runs: static lists, names, and a controller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.config import Config
from twinpool.proto import controller_pb2, controller_pb2_grpc, inference_pb2, inference_pb2_grpc
from twinpool.router.app import Router
from twinpool.router.discovery import ControllerDiscovery, DnsDiscovery, Resolve, StaticDiscovery, resolve_all
from twinpool.rpc import Dialer, RpcServer, Servicer, channel

if TYPE_CHECKING:
    from tests.unit.router.conftest import Cluster, FakeWorker

LIMIT_S = 20


class Names:
    """A resolver whose answers a test changes; an exception is raised."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        answer = self.answers[host]
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    async def asked_again(self) -> None:
        """Waits until every name was asked anew twice, so that an answer set before has been seen."""
        wanted = self.asked + 2 * len(self.answers) + 1
        while self.asked < wanted:
            await asyncio.sleep(0.005)


async def test_static_is_said_once() -> None:
    assert [found async for found in StaticDiscovery(["a:1", "b:2", "a:1"]).changes()] == [{"a:1", "b:2"}]


async def test_names_yield_all_addresses_and_each_change_once() -> None:
    names = Names(prefill=["10.0.0.2", "10.0.0.1"], decode=["fd00::1"])
    changes = DnsDiscovery(["prefill:90", "decode:91"], 0.01, names).changes()
    async with asyncio.timeout(LIMIT_S):
        assert await anext(changes) == {"10.0.0.1:90", "10.0.0.2:90", "[fd00::1]:91"}
        following = asyncio.ensure_future(anext(changes))
        names.answers["prefill"] = ["10.0.0.1", "10.0.0.2"]  # another order is no change
        await names.asked_again()
        names.answers["prefill"] = socket.gaierror(socket.EAI_AGAIN, "no server answers")
        await names.asked_again()
        assert not following.done()
        names.answers["decode"] = []
        assert await following == {"10.0.0.1:90", "10.0.0.2:90"}
        names.answers["prefill"] = ["10.0.0.3"]
        assert await anext(changes) == {"10.0.0.3:90"}
    await changes.aclose()


async def test_systems_resolver() -> None:
    assert "127.0.0.1" in await resolve_all("localhost", 80)
    assert await resolve_all("127.0.0.7", 80) == ["127.0.0.7"]
    assert not await resolve_all("no-such-host.invalid", 80)


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Sends what is put into ``sets``."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[list[str]] = asyncio.Queue()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[controller_pb2.WatchResponse]:
        while True:
            yield controller_pb2.WatchResponse(addresses=await self.sets.get())


async def test_controller_is_followed_over_its_restart() -> None:
    controller = Controller()
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    servicer = Servicer("twinpool.controller.v1.ControllerService", lambda server: add(controller, server))
    server = await RpcServer.start("127.0.0.1", 0, [servicer], "hush")
    port = server.port
    changes = ControllerDiscovery(f"127.0.0.1:{port}", Dialer("hush")).changes()
    async with asyncio.timeout(LIMIT_S):
        controller.sets.put_nowait(["a:1"])
        assert await anext(changes) == {"a:1"}
        following = asyncio.ensure_future(anext(changes))
        await server.stop(0)
        server = await RpcServer.start("127.0.0.1", port, [servicer], "hush")
        controller.sets.put_nowait(["a:1", "b:2"])
        assert await following == {"a:1", "b:2"}
    await changes.aclose()
    await server.stop(0)


@contextlib.asynccontextmanager
async def router_of(folder: Path, names: Resolve, port: int) -> AsyncIterator[Router]:
    settings = {"grpc_port": 0, "http_port": 0, "disaggregate": "never", "drain_timeout_s": 0}
    settings |= {"discovery": "dns", "discovery_interval_s": 0.01, "workers": [f"decode:{port}"]}
    session = {"report_interval_s": 0.05, "suspect_after_s": 0.3, "dead_after_s": 0.6}
    config = Config.model_validate({"router": settings, "session": session})
    router = await Router.start(config, folder, names)
    try:
        yield router
    finally:
        await router.stop(0)


@pytest.fixture
async def pool(make_cluster: Any) -> AsyncIterator[list[FakeWorker]]:
    """Three decode workers at 127.0.0.2, .3 and .4 with one port; the second and third are not started."""

    def setup(cluster: Cluster) -> None:
        cluster.workers[0].host = "127.0.0.2"

    async with make_cluster("hello world", prefills=0, decodes=1, setup=setup) as cluster:
        first: FakeWorker = cluster.workers[0]
        others = [
            type(first)("decode", f"decode-{number}", first.script, host=f"127.0.0.{number + 2}", port=first.port)
            for number in (1, 2)
        ]
        yield [first, *others]
        for worker in others:
            await worker.kill()


async def ask(router: Router) -> str:
    async with channel(f"127.0.0.1:{router.grpc_port}") as opened:
        request = inference_pb2.GenerateRequest(text="x")
        parts = [part async for part in inference_pb2_grpc.InferenceServiceStub(opened).Generate(request)]
    return "".join(part.text for part in parts)


async def test_workers_come_and_go(model_folder: Path, pool: list[FakeWorker]) -> None:
    first, second, third = pool
    names = Names(decode=[])

    def known(router: Router) -> dict[str, str]:
        return {session.address.split(":")[0]: session.state for session in router.registry.sessions}

    async def until(router: Router, wanted: dict[str, str]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while known(router) != wanted:
                await router.registry.wait_changed()

    async with router_of(model_folder, names, first.port) as router:
        await until(router, {})
        names.answers["decode"] = [first.host]
        await until(router, {first.host: "alive"})
        assert await ask(router) == "hello world"

        await second.start()
        names.answers["decode"] = [first.host, second.host, third.host]  # the third is not up yet
        await until(router, {first.host: "alive", second.host: "alive", third.host: "connecting"})

        sessions = first.sessions
        names.answers["decode"] = [second.host]
        await until(router, {first.host: "alive", second.host: "alive"})
        await names.asked_again()
        assert await ask(router) == "hello world"
        assert first.sessions == sessions
        assert known(router)[first.host] == "alive"  # its session has not ended

        names.answers["decode"] = [first.host, second.host]
        await names.asked_again()
        await first.kill()
        await until(router, {first.host: "dead", second.host: "alive"})
        await first.restart()
        await until(router, {first.host: "alive", second.host: "alive"})

        names.answers["decode"] = [second.host]
        await names.asked_again()
        await first.kill()
        await until(router, {second.host: "alive"})
        assert await ask(router) == "hello world"

        names.answers["decode"] = OSError("no name server")
        await names.asked_again()
        assert known(router) == {second.host: "alive"}
        assert await ask(router) == "hello world"
