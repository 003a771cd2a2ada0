"""TLS with certificates on both sides, over whole processes: what is let in, and what strangers are told."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority, Pair, needs_openssl

from clusters import Cluster, Node, free_ports
from deployments import twinpool, up
from twinpool import AsyncClient
from twinpool.tls import ClientTls

pytestmark = needs_openssl()
TOKEN = "hush"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


class Names:
    """A deployment's authority and another one, with certificates of both."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = Authority(folder / "ours"), Authority(folder / "theirs")
        self.client, self.stranger = self.ours.sign("client"), self.theirs.sign("client")

    def process(self, name: str) -> dict[str, object]:
        """Settings of a process with a certificate of its own; the router's clients must show one too."""
        section = {f"tls.{key}": value for key, value in self.ours.settings(self.ours.sign(name)).items()}
        return {**section, "tls.public_client_ca": str(self.ours.ca)}

    def flags(self, pair: Pair | None, ca: Path | None = None) -> list[str]:
        """Of a command that shows ``pair``."""
        shown = [] if pair is None else ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
        return ["--tls-ca", str(ca or self.ours.ca), *shown]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Names:
    return Names(tmp_path_factory.mktemp("names"))


@contextlib.asynccontextmanager
async def secured(folder: Path, model: Path, names: Names) -> AsyncIterator[Cluster]:
    cluster = Cluster.of(folder, model, settings={"session.token": TOKEN})
    cluster.overrides = {name: names.process(name) for name in cluster.nodes}
    cluster.tls = ClientTls(str(names.ours.ca), str(names.client.cert), str(names.client.key))
    async with cluster.started():
        yield cluster


async def refusal(address: str, *flags: str) -> str:
    """What ``twinpool generate`` says when it is not let in; one line."""
    code, output, errors = await twinpool("generate", "x", "--address", address, *flags)
    assert (code, output) == (1, ""), errors
    assert len(errors.splitlines()) == 1, errors
    line = errors.strip()
    assert line.startswith("error: "), line
    return line


async def test_three_processes_with_certificates(tiny_llama: Path, tmp_path: Path, names: Names) -> None:
    async with secured(tmp_path, tiny_llama, names) as cluster:
        async with cluster.client() as client:
            answer = await client.generate([1] * 40, **OPTIONS)
            assert answer.usage.remote_tokens == 40, "the KV plane's session is up"
            await cluster.all_free()
        await check_clients(cluster, names)
        await check_http(cluster, names)
        await check_internal(cluster, names)


async def check_clients(cluster: Cluster, names: Names) -> None:
    """The command line with the right certificate, and with none, another authority's, or no TLS."""
    code, output, errors = await twinpool("status", "--address", cluster.address, *names.flags(names.client))
    assert code == 0, errors
    assert "decode-0" in output
    for flags in (names.flags(None), names.flags(names.stranger)):
        assert "certificate" in await refusal(cluster.address, *flags)
    assert "certificate" in await refusal(cluster.address, *names.flags(names.client, names.theirs.ca))
    assert "TLS" in await refusal(cluster.address)


async def check_http(cluster: Cluster, names: Names) -> None:
    async def models(pair: Pair | None) -> int:
        context = ssl.create_default_context(cafile=str(names.ours.ca))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        async with httpx.AsyncClient(verify=context, timeout=60) as http:
            return (await http.get(f"https://127.0.0.1:{cluster.http_port}/v1/models")).status_code

    assert await models(names.client) == 200
    for pair in (None, names.stranger):
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            await models(pair)


async def check_internal(cluster: Cluster, names: Names) -> None:
    """A router with the token and another authority's certificate, and one without TLS, get no session."""
    workers = [node.address for node in cluster.nodes.values() if node.role != "router"]
    theirs = {f"tls.{key}": value for key, value in names.theirs.settings(names.stranger).items()}
    for name, section in (("stranger", {**theirs, "tls.public": False}), ("plain", {})):
        port, http_port = free_ports(2)
        cluster.nodes[name] = Node(name, "router", port)
        cluster.overrides[name] = {**section, "router.http_port": http_port, "router.workers": workers}
        cluster.launch(name)
        async with AsyncClient(cluster.nodes[name].address) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(Exception):
                    status = await client.status()
                    if all(worker.state == "refused" for worker in status.workers):
                        break
                await asyncio.sleep(0.1)
        assert len(status.workers) == 2
        assert not status.ready
        for worker in status.workers:
            assert "\n" not in worker.error
            assert worker.error.startswith(f"no connection to {worker.address}: "), worker.error
            assert "certificate" in worker.error
        assert cluster.log(name).count("no session with a worker") == 2, "each is told once"
        cluster.terminate(name)
    await cluster.until(lambda status: all(worker.state == "alive" for worker in status.workers))


@pytest.mark.slow
async def test_up_with_certificates(tiny_llama: Path, tmp_path: Path, names: Names) -> None:
    pair = names.ours.sign("all")
    settings = {f"tls.{key}": str(value) for key, value in names.ours.settings(pair).items()}
    settings["tls.public_client_ca"] = str(names.ours.ca)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    async with up(tiny_llama, tmp_path, settings) as (said, process):
        assert said["http"].startswith("https://")
        code, output, errors = await twinpool("generate", "x", "-n", "3", "--address", said["grpc"], *words)
        assert code == 0, errors
        assert output
        code, _, errors = await twinpool("scale", "decode", "2", "--address", said["controller"], *words)
        assert code == 0, errors
        code, output, errors = await twinpool("status", "--address", said["grpc"], *words, "--json")
        assert output.count('"alive"') == 3, output
        code, _, errors = await twinpool("drain", "decode-0", "--address", said["admin"], *words)
        assert code in (0, 1), errors
        assert len(errors.splitlines()) <= 1
        assert "certificate" in await refusal(said["grpc"], *names.flags(names.stranger))
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
