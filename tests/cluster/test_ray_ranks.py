"""Ranks that Ray places: exact, spread over nodes, gone as a whole, and living on when Ray does not."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from load import prompt, stream
from processes import alive, children, command, listening, marked, parent
from ray_nodes import RayNodes

from clusters import Cluster, free_ports
from deployments import up
from pair import Ask, Pool, pair
from ray_cluster import RayCluster
from twinpool import AsyncClient
from twinpool.config import RaySection
from twinpool.engine.request import StopParams

pytest.importorskip("ray")

MARK = "RANKS_TEST_MARK"
TOKENS, LONG = 24, 150
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}
PROMPTS = [prompt(number, length) for number, length in enumerate((1, 16, 17, 90))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_tiny_llama: Any) -> Path:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=3, max_position_embeddings=4096)
    return folder


def answers(pool: Pool, limit: int) -> list[list[int]]:
    with pair(pool, caching=False) as engine:
        asks = [Ask(ids, stop=StopParams(limit, ignore_eos=True)) for ids in PROMPTS]
        return [engine.serve([ask])[0][0].tokens for ask in asks]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    """What one process says."""
    pool = Pool.load(model, 16, 100)
    said = answers(pool, LONG)
    pool.close()
    return said


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="rn", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes({MARK: secrets.token_hex(8)})
    try:
        cluster.start(3)
        yield cluster
    finally:
        cluster.stop()
        assert not marked(MARK, cluster.mark[MARK])


def ranks(mark: str) -> list[int]:
    """Processes of ranks: the children of their keepers."""
    keepers = [pid for pid in marked(MARK, mark) if "rank_keeper" in command(pid)]
    return [pid for pid in keepers if parent(pid) in keepers or not any(child in keepers for child in children(pid))]


def actors(mark: str) -> list[int]:
    return [pid for pid in marked(MARK, mark) if "RankActor" in command(pid)]


def node_of(pid: int) -> int:
    """The process of the Ray node above the process."""
    while "ray_node" not in command(pid):
        pid = parent(pid)
        assert pid > 1
    return pid


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def check_addresses(mark: str) -> None:
    """Nothing of ours, torch, gloo, UCX, gRPC or Ray accepts connections from outside."""
    parts = {"gcs_server", "raylet", "RuntimeEnvAgent", "RankActor", "rank_keeper", "serve follower"}

    def open_sockets() -> list[tuple[str, str]]:
        found = []
        ours = marked(MARK, mark)
        # A process that gives itself a title may overwrite the environment by which it is known: Ray's agents do.
        for pid in {*ours, *(child for parent_pid in ours for child in children(parent_pid))}:
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                found += [(command(pid)[:150], address) for address in listening(pid)]
        return found

    def closed() -> set[str]:
        return {part for part in parts if not any(part in name for name, _ in open_sockets())}

    # Ray's agents open theirs when they come to it.
    with contextlib.suppress(TimeoutError):
        await until(lambda: not closed(), 60)
    assert not closed()
    for name, address in open_sockets():
        assert ipaddress.ip_address(address).is_loopback, f"{name} listens on {address}"


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
async def test_ranks_on_two_nodes_of_three_say_the_same(
    nodes: RayNodes, model: Path, wanted: list[list[int]], tp_size: int, pp_size: int
) -> None:
    pool = Pool.load(model, 16, 100, tp_size, pp_size, RaySection(address=nodes.address, cpus_per_rank=0.6))
    try:
        assert answers(pool, TOKENS) == [tokens[:TOKENS] for tokens in wanted]
        (rank,) = ranks(nodes.mark[MARK])
        assert node_of(rank) in [process.pid for process in nodes.processes[1:]]
    finally:
        pool.close()
    await until(lambda: not ranks(nodes.mark[MARK]))


async def test_a_given_placement_group_takes_the_ranks_in_order(
    nodes: RayNodes, model: Path, wanted: list[list[int]]
) -> None:
    nodes.run(
        "from ray.util.placement_group import placement_group\n"
        "own = ray.get_runtime_context().get_node_id()\n"
        "group = placement_group([{'CPU': 0.5}] * 2, name='given', lifetime='detached', "
        "bundle_label_selector=[{'ray.io/node-id': own}, {'number': '2'}])\n"
        "assert group.wait(20)",
        "replicas",
    )
    given = RaySection(address=nodes.address, namespace="replicas", placement_group="given", cpus_per_rank=0.5)
    pool = Pool.load(model, 16, 100, 2, 1, given)
    try:
        assert answers(pool, TOKENS) == [tokens[:TOKENS] for tokens in wanted]
        (rank,) = ranks(nodes.mark[MARK])
        assert node_of(rank) == nodes.processes[2].pid
    finally:
        pool.close()
    await until(lambda: not ranks(nodes.mark[MARK]))
    nodes.run("ray.util.remove_placement_group(ray.util.get_placement_group('given'))", "replicas")


async def test_a_rank_dies_and_its_worker_with_it(
    nodes: RayNodes, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of a worker, whether a rank, its actor or rank 0 is killed; and its room is free again."""
    settings: dict[str, object] = {
        "decode.tp_size": 2,
        "decode.launcher": "ray",
        "decode.engine.num_blocks": 100,
        "ray.address": nodes.address,
        "ray.cpus_per_rank": 0.6,
    }
    mark, group = nodes.mark[MARK], secrets.token_hex(8)
    monkeypatch.setenv(MARK, group)
    cluster = Cluster.of(tmp_path, model, 0, 1, {"router.disaggregate": "never"} | settings)
    try:
        cluster.launch_all()
        await cluster.ready()
        router = cluster.nodes["router"].process
        assert router is not None
        for victim in ("rank", "actor", "rank 0"):
            await cluster.heal()
            (rank,) = ranks(mark)
            (actor,) = actors(mark)
            if victim == "rank 0":
                cluster.kill("decode-0")
            else:
                os.kill(rank if victim == "rank" else actor, signal.SIGKILL)
                assert await asyncio.to_thread(cluster.wait, "decode-0") == 1
            await until(lambda: not ranks(mark) and not actors(mark) and marked(MARK, group) == [router.pid])
    finally:
        cluster.stop()


@pytest.mark.slow
async def test_a_worker_with_a_cluster_of_its_own(
    tmp_path: Path, ray_folder: str, model: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower lends its node; nothing listens beyond loopback; the head dies under a stream, which goes on."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("RAY_TMPDIR", ray_folder)
    head_port, health_port = free_ports(2)
    settings: dict[str, object] = {
        "model.dtype": "float32",
        "session.token": "secret",
        "session.dead_after_s": 5.0,
        "decode.tp_size": 2,
        "decode.launcher": "ray",
        "decode.engine.num_blocks": 300,
        "prefill.engine.num_blocks": 300,
        "ray.head_port": head_port,
        "ray.node_cpus": 1,
    }
    cluster = Cluster.of(tmp_path, model, 1, 1, settings)
    with (tmp_path / "follower.log").open("wb") as log:
        argv = [sys.executable, "-P", "-m", "twinpool", "serve", "follower", "--head", f"127.0.0.1:{head_port}"]
        argv += ["--port", str(health_port), "--set", "ray.node_cpus=1", "--set", "session.token=secret"]
        follower = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        cluster.launch_all()
        await cluster.ready()
        (rank,) = ranks(mark)
        async with cluster.client() as client:
            for ids, tokens in zip(PROMPTS, wanted, strict=True):
                answer = await client.generate(ids, **GREEDY)
                assert list(answer.token_ids) == tokens[:TOKENS]
                assert answer.usage.remote_tokens == len(ids)
            await check_addresses(mark)

            async def kill_head() -> None:
                (gcs,) = [pid for pid in marked(MARK, mark) if "gcs_server" in command(pid)]
                os.kill(gcs, signal.SIGKILL)

            disturbed = await stream(client, PROMPTS[2], 10, kill_head, **GREEDY | {"max_tokens": LONG})
            assert list(disturbed.token_ids) == wanted[2]
            # The head's own node goes at once, the follower's after a while.
            await until(lambda: not any("raylet" in command(pid) for pid in marked(MARK, mark)), 60)
            again = await client.generate(PROMPTS[3], **GREEDY)
            assert list(again.token_ids) == wanted[3][:TOKENS]
            assert alive(rank)
            assert follower.poll() is None
        assert await asyncio.to_thread(cluster.terminate, "decode-0") == 0
        assert await asyncio.to_thread(follower.wait, 30) == 1
        cluster.stop()
        await until(lambda: not marked(MARK, mark))
    finally:
        cluster.stop()
        if follower.poll() is None:
            follower.terminate()
            follower.wait(20)


@pytest.mark.slow
async def test_a_controller_places_a_worker_of_two_ranks(
    tmp_path: Path, model: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    settings = {
        "controller.launcher": "ray",
        "session.token": "a token that lasts",
        "model.dtype": "float32",
        "decode.tp_size": "2",
        "prefill.node_labels": "pool=prefill",
        "decode.node_labels": "pool=decode",
    }
    cluster = await asyncio.to_thread(RayCluster, [("prefill", 1), ("decode", 1), ("decode", 1)])
    try:
        async with up(model, tmp_path, settings | {"ray.address": cluster.address}, cluster.environment) as (at, _):
            async with AsyncClient(at["grpc"]) as client:
                for ids, tokens in zip(PROMPTS, wanted, strict=True):
                    assert list((await client.generate(ids, **GREEDY)).token_ids) == tokens[:TOKENS]
            (rank,) = ranks(mark)
            (worker,) = cluster.workers()["decode"]
            raylets = {parent(parent(pid)) for pid in (parent(rank), worker)}
            assert len(raylets) == 2  # a node each
        await until(lambda: not ranks(mark))
    finally:
        await asyncio.to_thread(cluster.stop)
