"""Real deployments for tests: a router, prefill and decode workers as processes on loopback.

Nobody restarts them unless a test calls ``launch`` or ``heal``. ``stop`` ends whatever still runs, stopped or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import httpx
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinpool import AsyncClient, rpc
from twinpool.results import Status
from twinpool.tls import ClientTls

READY_TIMEOUT_S = 120.0
DEFAULTS: dict[str, object] = {
    "router.disaggregate": "always",
    "router.max_queue_s": 600.0,  # busy machines are slow, and that is not what is tested
    "router.drain_timeout_s": 1.0,
    "prefill.drain_timeout_s": 1.0,
    "decode.drain_timeout_s": 1.0,
}
INFERENCE = "twinpool.inference.v1.InferenceService"


OWN_PORTS = range(10_000, 32_768)
"""Below those that Linux gives to connections that go out, which would take a port while a process is away."""


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(OWN_PORTS, len(OWN_PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            found.append(port)
    return found


@dataclass
class Node:
    """One process of a cluster."""

    name: str
    role: str
    port: int
    kv_port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass
class Cluster:
    """Processes by name: router, prefill-0, ..., decode-0, ...; ``settings`` are dotted configuration keys.

    ``overrides`` are settings of single processes, by name; they may change between two launches. ``entries`` are
    programs that run instead of ``-m twinpool``, by name.
    """

    folder: Path
    model: Path
    settings: dict[str, object]
    overrides: dict[str, dict[str, object]] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    http_port: int = 0
    admin_port: int = 0
    entries: dict[str, Path] = field(default_factory=dict)
    tls: ClientTls | None = None
    """How clients reach the router; None in plain text."""

    @classmethod
    def of(
        cls,
        folder: Path,
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        settings: dict[str, object] | None = None,
        overrides: dict[str, dict[str, object]] | None = None,
    ) -> Cluster:
        """A deployment on free ports; nothing runs yet."""
        cluster = cls(folder, model, DEFAULTS | (settings or {}), overrides or {})
        ports = iter(free_ports(3 + 2 * prefill + decode))
        cluster.http_port, cluster.admin_port = next(ports), next(ports)
        cluster.nodes["router"] = Node("router", "router", next(ports))
        for index in range(prefill):
            name = f"prefill-{index}"
            cluster.nodes[name] = Node(name, "prefill", next(ports), next(ports))
        for index in range(decode):
            name = f"decode-{index}"
            cluster.nodes[name] = Node(name, "decode", next(ports))
        return cluster

    @property
    def address(self) -> str:
        return self.nodes["router"].address

    def client(self, **options: float) -> AsyncClient:
        return AsyncClient(self.address, tls=self.tls or False, **options)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def launch(self, name: str) -> None:
        """Starts (again) the process of ``name`` at its address."""
        node = self.nodes[name]
        values = dict(self.settings)
        if node.role == "router":
            workers = [other.address for other in self.nodes.values() if other.role != "router"]
            values |= {"router.grpc_port": node.port, "router.http_port": self.http_port, "router.workers": workers}
            if name == "router":
                values["router.admin_port"] = self.admin_port
        else:
            values |= {f"{node.role}.port": node.port, f"{node.role}.worker_id": name}
            if node.role == "prefill":
                values["prefill.kv_port"] = node.kv_port
        values = {"model.path": str(self.model)} | values | self.overrides.get(name, {})
        config: dict[str, dict[str, object]] = {}
        for key, value in values.items():
            *sections, leaf = key.split(".")
            target = config
            for section in sections:
                target = target.setdefault(section, {})  # type: ignore[assignment]
            target[leaf] = value  # type: ignore[assignment]
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        entry = self.entries.get(name)
        program = ["-m", "twinpool"] if entry is None else [str(entry)]
        command = [sys.executable, "-P", *program, "serve", node.role, "--config", str(path)]
        with (self.folder / f"{name}.log").open("ab") as log:
            node.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def launch_all(self) -> None:
        for name in self.nodes:
            self.launch(name)

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Ready within the block, stopped after it; for fixtures of a module, which have no event loop."""
        try:
            self.launch_all()
            asyncio.run(self.ready())
            yield self
        finally:
            self.stop()

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[Cluster]:
        """The same within an event loop."""
        try:
            self.launch_all()
            await self.ready()
            yield self
        finally:
            self.stop()

    def signal(self, name: str, signum: signal.Signals) -> None:
        process = self.nodes[name].process
        assert process is not None
        process.send_signal(signum)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        process = self.nodes[name].process
        assert process is not None
        process.wait(10)

    def terminate(self, name: str, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(name, signal.SIGTERM)
        return self.wait(name, timeout_s)

    def wait(self, name: str, timeout_s: float = 30.0) -> int:
        process = self.nodes[name].process
        assert process is not None
        return process.wait(timeout_s)

    async def heal(self, timeout_s: float = READY_TIMEOUT_S) -> Status:
        """Continues and restarts what a test stopped or killed; waits until all are linked and everything is free."""
        for name, node in self.nodes.items():
            assert node.process is not None
            if node.process.poll() is not None:
                self.launch(name)
            else:
                node.process.send_signal(signal.SIGCONT)
        await self.ready()
        return await self.all_back(timeout_s)

    async def all_back(self, timeout_s: float) -> Status:
        """Waits until every worker is alive, linked and free."""
        return await self.until(lambda status: self.is_linked(status) and is_free(status), timeout_s)

    def is_linked(self, status: Status) -> bool:
        """Whether every worker is alive and every decode worker linked with every prefill worker."""
        roles = [node.role for node in self.nodes.values()]
        alive = [worker for worker in status.workers if worker.state == "alive"]
        links = sum(link.linked for worker in alive for link in worker.links)
        num_prefill, num_decode = roles.count("prefill"), roles.count("decode")
        return len(alive) == num_prefill + num_decode and links == num_prefill * num_decode

    async def ready(self) -> None:
        """Waits until the router can serve; fails with the logs of a process that died."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            watching = asyncio.create_task(self._watch())
            while not watching.done():
                await asyncio.wait([watching], timeout=0.2)
                for node in self.nodes.values():
                    assert node.process is not None
                    if node.process.poll() not in (None, 0):
                        watching.cancel()
                        raise AssertionError(f"{node.name} ended with {node.process.poll()}:\n{self.log(node.name)}")
            await watching

    async def _watch(self) -> None:
        while True:
            async with rpc.channel(self.address, tls=self.tls) as channel:
                try:
                    request = health_pb2.HealthCheckRequest(service=INFERENCE)
                    async for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
                        if response.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)

    async def metrics(self) -> dict[str, float]:
        """What the router's scrape shows, by name and labels."""
        async with httpx.AsyncClient(timeout=60) as http:
            text = (await http.get(f"http://127.0.0.1:{self.http_port}/metrics")).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def busy(self, role: str) -> str:
        """The worker of a pool that has the most requests, once one has some: which one that is, the router decides."""
        status = await self.until(lambda status: any(w.role == role and w.running for w in status.workers))
        pool = [worker for worker in status.workers if worker.role == role]
        return max(pool, key=lambda worker: worker.running).worker_id

    async def until(self, condition: Callable[[Status], bool], timeout_s: float = 10.0) -> Status:
        """Waits until the router's status satisfies ``condition``; on failure shows the last one."""
        async with self.client() as client:
            status = await client.status()
            try:
                async with asyncio.timeout(timeout_s):
                    while not condition(status):
                        await asyncio.sleep(0.1)
                        status = await client.status()
            except TimeoutError:
                raise AssertionError(f"never reached; last status: {status}") from None
            return status

    async def all_free(self, timeout_s: float = 10.0) -> Status:
        """Waits until no live worker holds a block, a request or an exchange."""
        return await self.until(is_free, timeout_s)

    def stop(self) -> None:
        processes = [node.process for node in self.nodes.values() if node.process is not None]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def is_free(status: Status) -> bool:
    """Whether no live worker holds a block, a request or an exchange."""
    return all(
        worker.free_blocks == worker.total_blocks
        and not (worker.running or worker.waiting or worker.loading or worker.held)
        and not (worker.open_exchanges or worker.quarantined_blocks)
        for worker in status.workers
        if worker.state == "alive"
    )
