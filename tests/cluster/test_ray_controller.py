"""``twinpool up --launcher ray`` on a cluster of three nodes: placed by label, replaced, adopted, scaled.

The head holds no replica. It dies, and the controller dies, and no running stream notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import alive, children, command

from background_load import background_load
from clusters import is_free
from deployments import LIMIT_S, twinpool, up
from ray_cluster import RayCluster
from twinpool import AsyncClient
from twinpool.results import Status

pytest.importorskip("ray")

TOKEN = "a token that outlives the launcher"
SETTINGS = {
    "controller.launcher": "ray",
    "prefill.node_labels": "pool=prefill",
    "decode.node_labels": "pool=decode",
    "ray.orphan_s": "1",
}


@contextlib.asynccontextmanager
async def started(
    nodes: Sequence[tuple[str, int]], model: Path, folder: Path, settings: Mapping[str, str]
) -> AsyncIterator[tuple[RayCluster, dict[str, Any], asyncio.subprocess.Process]]:
    """A Ray cluster, and a deployment on it: what ``up --json`` says, and its process. Leaves no worker behind."""
    cluster = await asyncio.to_thread(RayCluster, nodes)
    try:
        settings = SETTINGS | {"ray.address": cluster.address} | dict(settings)
        environment = cluster.environment | {"TWINPOOL_SESSION__TOKEN": TOKEN}
        async with up(model, folder, settings, environment) as (addresses, launcher):
            yield cluster, addresses, launcher
            running = [pid for pids in cluster.workers().values() for pid in pids] + cluster.ranks()
        assert not any(map(alive, running))  # `up` has ended them
    finally:
        print(cluster.log())
        await asyncio.to_thread(cluster.stop)


@pytest.fixture
async def deployment(
    tiny_llama: Path, tmp_path: Path
) -> AsyncIterator[tuple[RayCluster, dict[str, Any], asyncio.subprocess.Process]]:
    async with started([("prefill", 3), ("decode", 3)], tiny_llama, tmp_path, {}) as found:
        yield found


def counts(cluster: RayCluster) -> dict[str, int]:
    return {pool: len(pids) for pool, pids in cluster.workers().items() if pids}


def controller_of(launcher: asyncio.subprocess.Process) -> int:
    return next(pid for pid in children(launcher.pid) if "serve controller" in command(pid))


async def scale(addresses: dict[str, str], pool: str, size: int) -> list[dict[str, Any]]:
    environment = os.environ | {"TWINPOOL_SESSION__TOKEN": TOKEN}
    at = ("--address", addresses["controller"])
    async with asyncio.timeout(LIMIT_S):
        while True:
            code, output, errors = await twinpool("scale", pool, str(size), *at, "--json", environment=environment)
            if "no controller answers" not in errors:
                break
    assert code == 0, output + errors
    return list(json.loads(output)["steps"])


async def until(client: AsyncClient, condition: Callable[[Status], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition(await client.status()):
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_replaced_adopted_and_undisturbed_by_the_end_of_head_and_controller(deployment: Any) -> None:
    ray_cluster, addresses, launcher = deployment
    assert counts(ray_cluster) == {"prefill": 1, "decode": 1}
    async with AsyncClient(addresses["grpc"]) as client:
        await scale(addresses, "decode", 2)
        async with background_load(client) as load:
            await load.served_by("decode-0", "decode-1")

            victim = ray_cluster.workers()["decode"][0]
            os.kill(victim, signal.SIGKILL)
            await load.served_by("decode-2")
            assert counts(ray_cluster) == {"prefill": 1, "decode": 2}
            await load.new_round()
            workers, redispatches = ray_cluster.workers(), load.redispatches

            ray_cluster.kill_head()
            os.kill(controller_of(launcher), signal.SIGKILL)
            await load.new_round()
            await load.more(40)
            assert ray_cluster.workers() == workers
            assert load.redispatches == redispatches
            ray_cluster.start_head()
            steps = await scale(addresses, "decode", 1)  # by the next controller, which has taken all up
            assert [(step["action"], step["worker"]) for step in steps] == [("removed", "decode-2")]
            await load.new_round()
        await until(client, lambda status: is_free(status) and len(status.workers) == 2)
    assert counts(ray_cluster) == {"prefill": 1, "decode": 1}


@pytest.mark.slow
async def test_both_pools_grow_and_shrink_under_load(deployment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ray_cluster, addresses, _ = deployment
    async with AsyncClient(addresses["grpc"]) as client, background_load(client) as load:
        steps = {}
        for pool, size in [("decode", 3), ("prefill", 2), ("decode", 1), ("prefill", 1)]:
            steps[f"{pool} to {size}"] = await scale(addresses, pool, size)
            await load.more(4)
            if pool == "decode" and size == 3:
                await load.served_by("decode-1", "decode-2")
                assert counts(ray_cluster) == {"prefill": 1, "decode": 3}
    with capsys.disabled():
        print(json.dumps(steps | {"requests": load.finished, "redispatches": load.redispatches}))
    assert counts(ray_cluster) == {"prefill": 1, "decode": 1}


@pytest.mark.slow
async def test_a_replica_over_two_nodes_is_replaced_as_a_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """Of two replicas of two ranks one fits on a node; the other spans two, and loses the rank on the far one."""
    nodes = [("prefill", 1), ("decode", 1), ("decode", 2), ("decode", 1)]
    settings = {"decode.tp_size": "2", "decode.replicas": "2"}
    async with started(nodes, tiny_llama, tmp_path, settings) as (cluster, addresses, _):

        def far_ranks() -> list[int]:
            homes = {cluster.node_of(pid) for pid in cluster.workers()["decode"]}
            return [pid for pid in cluster.ranks() if cluster.node_of(pid) not in homes]

        async with AsyncClient(addresses["grpc"]) as client:
            await until(client, lambda status: len(status.workers) == 3)
            (victim,), before = far_ranks(), cluster.ranks()
            async with background_load(client, (8, 20, 60)) as load:
                await load.served_by("decode-0", "decode-1")
                os.kill(victim, signal.SIGKILL)
                await load.new_round()  # by the other replica
                await load.served_by("decode-2")
                await load.new_round()
            await until(client, lambda status: is_free(status) and len(status.workers) == 3)
        after = cluster.ranks()
        assert len(after) == 2
        assert len(set(after) & set(before)) == 1
        assert len(far_ranks()) == 1
        assert counts(cluster) == {"prefill": 1, "decode": 2}
