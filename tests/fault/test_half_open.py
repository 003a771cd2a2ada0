"""Connections between processes that carry nothing any more and were never closed: as if the other machine were off.

Proxies on 127.0.0.2 stand before the workers. What passes through them is cut without FIN or RST, and new connections
are accepted and never answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from black_hole import Proxy
from load import FLOOD, all_kinds, check_all_same, flood, prompt

from clusters import Cluster, is_free
from twinpool.results import Status

FRONT = "127.0.0.2"
BACK_S = 30.0


class Wires:
    """The proxies, by process: ``worker`` for its routers, ``kv`` for decode workers."""

    def __init__(self, cluster: Cluster) -> None:
        workers = [node for node in cluster.nodes.values() if node.role != "router"]
        self.worker = {node.name: Proxy((FRONT, node.port), ("127.0.0.1", node.port)) for node in workers}
        self.kv = {
            node.name: Proxy((FRONT, node.kv_port), ("127.0.0.1", node.kv_port)) for node in workers if node.kv_port
        }

    def mend(self) -> None:
        for proxy in (*self.worker.values(), *self.kv.values()):
            proxy.mend()

    def close(self) -> None:
        for proxy in (*self.worker.values(), *self.kv.values()):
            proxy.close()


@pytest.fixture(scope="module")
def running_wired(
    tmp_path_factory: pytest.TempPathFactory, long_llama: Path, pace: dict[str, object]
) -> Iterator[tuple[Cluster, Wires]]:
    settings: dict[str, object] = {
        **pace,
        "model.dtype": "float32",
        "prefill.engine.prefill_chunk": 64,
        "prefill.engine.num_blocks": 900,
        "decode.engine.num_blocks": 900,
        "prefill.advertise": FRONT,
    }
    cluster = Cluster.of(tmp_path_factory.mktemp("wired"), long_llama, 2, 2, settings)
    fronts = [f"{FRONT}:{node.port}" for node in cluster.nodes.values() if node.role != "router"]
    cluster.overrides["router"] = {"router.workers": fronts}
    wires = Wires(cluster)
    try:
        with cluster.running():
            yield cluster, wires
    finally:
        wires.close()


@pytest.fixture
async def wired(running_wired: tuple[Cluster, Wires]) -> tuple[Cluster, Wires]:
    cluster, wires = running_wired
    wires.mend()
    await cluster.heal()
    return cluster, wires


async def test_decode_worker_is_cut_off_from_the_router(wired: tuple[Cluster, Wires]) -> None:
    cluster, wires = wired
    async with cluster.client() as client:
        wanted = await all_kinds(client, 300)
        victims: list[str] = []

        async def cut() -> None:
            victims.append(await cluster.busy("decode"))
            wires.worker[victims[0]].cut()

        got = await all_kinds(client, 300, after=60, then=cut)
        check_all_same(got, wanted)
        assert sum(answer.usage.redispatches for answer in got) > 0
        (survivor,) = {"decode-0", "decode-1"} - set(victims)
        assert {answer.decode_worker for answer in got if answer.usage.redispatches} == {survivor}
        await cluster.all_free()
        # It has noticed as well: the same process is back, and what it ran for the lost session is gone.
        process = cluster.nodes[victims[0]].process
        wires.mend()
        await cluster.all_back(BACK_S)
        assert process is not None
        assert process.poll() is None
        assert "no sign of life from the router" in cluster.log(victims[0])


async def test_prefill_worker_is_cut_off_from_the_router(wired: tuple[Cluster, Wires]) -> None:
    cluster, wires = wired
    prompts = [prompt(number, 2400) for number in range(51, 57)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    async with cluster.client() as client:
        wanted = [await client.generate(ids, cache_salt="calm", **options) for ids in prompts]
        running = flood(client, prompts, **options)
        wires.worker[await cluster.busy("prefill")].cut()
        got = await asyncio.gather(*running)
        check_all_same(got, wanted * FLOOD)
        assert sum(answer.usage.redispatches for answer in got) > 0
        await cluster.all_free()
        wires.mend()
        await cluster.all_back(BACK_S)


async def test_prefill_workers_are_cut_off_from_decode(wired: tuple[Cluster, Wires]) -> None:
    """One kv.v1 port is dead while both still answer the router: the other prefill worker takes over."""
    cluster, wires = wired
    prompts = [prompt(number, 2400) for number in range(61, 67)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    async with cluster.client() as client:
        wanted = [await client.generate(ids, cache_salt="calm", **options) for ids in prompts]
        running = flood(client, prompts, **options)
        await cluster.until(lambda status: any(worker.loading for worker in status.workers))
        victim = await cluster.busy("prefill")
        wires.kv[victim].cut()
        got = await asyncio.gather(*running)
        check_all_same(got, wanted * FLOOD)
        assert sum(answer.usage.redispatches for answer in got) > 0

        def unlinked(status: Status) -> bool:
            links = [link for worker in status.workers for link in worker.links if link.prefill_worker == victim]
            return len(links) == 2 and not any(link.linked for link in links) and is_free(status)

        # Both ends have let go, although nobody closed anything: holds there, destinations here.
        await cluster.until(unlinked)
        assert "no sign of life from decode-" in cluster.log(victim)
        wires.mend()
        await cluster.all_back(BACK_S)
        again = [await client.generate(ids, cache_salt="after", **options) for ids in prompts[:2]]
        check_all_same(again, wanted[:2])
