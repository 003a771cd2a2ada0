"""Workers of several ranks in a real deployment: exact, closed to the outside, and gone as a whole when a rank dies."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from load import prompt, stream
from processes import alive, children, listening

from clusters import Cluster
from pair import Ask, Pool, pair
from twinpool.engine.request import StopParams

SETTINGS: dict[str, object] = {
    "model.dtype": "float32",
    "prefill.tp_size": 2,
    "prefill.pp_size": 2,
    "prefill.engine.prefill_chunk": 32,
    "prefill.engine.num_blocks": 300,
    "decode.tp_size": 2,
    "decode.engine.num_blocks": 300,
    "session.dead_after_s": 5.0,
}
TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}


async def gone(pids: list[int], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while any(map(alive, pids)):
            await asyncio.sleep(0.05)


def ranks(cluster: Cluster, name: str) -> list[int]:
    process = cluster.nodes[name].process
    assert process is not None
    return children(process.pid)


def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine on one rank says."""
    pool = Pool.load(model, 16, 100)
    with pair(pool, caching=False) as alone:
        asks = [Ask(ids, stop=StopParams(TOKENS, ignore_eos=True)) for ids in prompts]
        tokens = [alone.serve([ask])[0][0].tokens for ask in asks]
    pool.close()
    return tokens


async def test_a_rank_dies_and_its_worker_with_it(tmp_path: Path, start_cluster: Any, make_tiny_llama: Any) -> None:
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=3)
    prompts = [prompt(number, length) for number, length in enumerate((1, 16, 17, 150))]
    wanted = await asyncio.to_thread(expected, model, prompts)
    async with start_cluster(model, 1, 2, SETTINGS) as cluster, cluster.client() as client:
        assert len(ranks(cluster, "prefill-0")) == 3
        assert [len(ranks(cluster, name)) for name in ("decode-0", "decode-1")] == [1, 1]
        check_addresses(cluster)
        victim = ranks(cluster, "decode-0")

        async def kill() -> None:
            os.kill(victim[0], signal.SIGKILL)

        got = await asyncio.gather(
            stream(client, prompts[0], 10, kill, **GREEDY), *(stream(client, ids, **GREEDY) for ids in prompts[1:])
        )
        assert [list(answer.token_ids) for answer in got] == wanted
        assert await asyncio.to_thread(cluster.wait, "decode-0") == 1
        await gone(victim)
        await cluster.all_free()

        survivors = ranks(cluster, "decode-1") + ranks(cluster, "prefill-0")
        await cluster.heal()
        again = await client.generate(prompts[3], **GREEDY)
        assert list(again.token_ids) == wanted[3]
        assert again.usage.remote_tokens + again.usage.decode_cached_tokens == len(prompts[3])
        orphans = ranks(cluster, "decode-0")
        assert len(orphans) == 1
        cluster.kill("decode-0")
        await gone(orphans)
        assert all(map(alive, survivors))
        assert await asyncio.to_thread(cluster.terminate, "decode-1") == 0
        assert await asyncio.to_thread(cluster.terminate, "prefill-0") == 0
        await gone(survivors)


@pytest.mark.parametrize("connector", ["nccl", pytest.param("local", marks=pytest.mark.slow)])
async def test_other_connectors_between_ranks(
    tmp_path: Path, start_cluster: Any, make_tiny_llama: Any, connector: str
) -> None:
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=3)
    prompts = [prompt(number, length) for number, length in enumerate((1, 16, 17, 150))]
    wanted = await asyncio.to_thread(expected, model, prompts)
    settings = SETTINGS | {"transport.connector": connector}
    async with start_cluster(model, settings=settings) as cluster, cluster.client() as client:
        got = await asyncio.gather(*(client.generate(ids, **GREEDY) for ids in prompts))
        assert [list(answer.token_ids) for answer in got] == wanted
        assert all(answer.usage.remote_tokens == len(ids) for answer, ids in zip(got, prompts, strict=True))
        assert {answer.usage.transport.partition("/")[0] for answer in got} == {connector}
        check_addresses(cluster)
        await cluster.all_free()


def check_addresses(cluster: Cluster) -> None:
    """Nothing that torch, gloo, UCX or gRPC opened accepts connections from outside."""
    count = 0
    for name, node in cluster.nodes.items():
        assert node.process is not None
        for pid in [node.process.pid, *ranks(cluster, name)]:
            for address in listening(pid):
                count += 1
                assert ipaddress.ip_address(address).is_loopback, f"{name} (process {pid}) listens on {address}"
    assert count >= len(cluster.nodes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode.tp_size": 3}, "2 KV heads cannot be replicated over tensor parallel size 3"),
        ({"decode.pp_size": 3}, "pp_size 3 is more than the 2 layers"),
        ({"decode.tp_size": 2, "decode.engine.num_blocks": 10**9}, "beside the weights"),
    ],
)
async def test_a_shape_that_does_not_fit_is_refused_with_numbers(
    tmp_path: Path, tiny_llama: Path, settings: dict[str, object], message: str
) -> None:
    cluster = Cluster.of(tmp_path, tiny_llama, 0, 1, settings)
    try:
        cluster.launch("decode-0")
        assert await asyncio.to_thread(cluster.wait, "decode-0", 60.0) == 2
        lines = [line for line in cluster.log("decode-0").splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert message in lines[0]
    finally:
        cluster.stop()
