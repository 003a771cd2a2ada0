"""SIGTERM and scaling down: nothing fails, and the process ends with exit code 0."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from load import all_kinds, check_all_same, prompt

from clusters import Cluster
from twinpool import AsyncClient
from twinpool.results import Completion


async def test_scaling_both_pools_from_two_to_one_under_load(farm: Cluster) -> None:
    """Streams outlast the drain time of a second: they are handed over."""
    async with farm.client() as client:
        wanted = await all_kinds(client, 60)
        long = [prompt(70 + number, 100) for number in range(8)]
        options: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.0, "seed": 5, "ignore_eos": True}
        wanted_long = await asyncio.gather(*(client.generate(ids, **options) for ids in long))
        leaving = asyncio.Event()
        loops = [asyncio.create_task(keep_asking(client, wanted, leaving)) for _ in range(2)]
        streams = [asyncio.create_task(client.generate(ids, **options)) for ids in long]
        await farm.until(lambda status: all(w.running > 2 for w in status.workers if w.role == "decode"), 30.0)
        codes = await asyncio.gather(
            asyncio.to_thread(farm.terminate, "decode-0"), asyncio.to_thread(farm.terminate, "prefill-0")
        )
        assert codes == [0, 0]
        leaving.set()
        assert sum(await asyncio.gather(*loops)) > 0
        got = await asyncio.gather(*streams)
        check_all_same(got, wanted_long)
        assert sum(answer.usage.redispatches for answer in got) > 0
        await farm.all_free()


async def keep_asking(client: AsyncClient, wanted: list[Completion], enough: asyncio.Event) -> int:
    """Asks and compares until it is enough; returns the number of rounds."""
    rounds = 0
    while not enough.is_set():
        check_all_same(await all_kinds(client, 60), wanted)
        rounds += 1
    return rounds


@pytest.mark.slow
async def test_the_third_crash_of_the_worker_that_runs_it_ends_a_request(farm: Cluster) -> None:
    from twinpool.errors import TwinpoolError, Unavailable

    crashes = 0

    async def crash(client: AsyncClient) -> None:
        """Kills the worker that runs the stream; its place is taken again before the next."""
        nonlocal crashes
        status = await farm.until(
            lambda status: any(worker.running for worker in status.workers if worker.role == "decode"), 60.0
        )
        victim = next(worker.worker_id for worker in status.workers if worker.role == "decode" and worker.running)
        farm.kill(victim)
        crashes += 1
        farm.launch(victim)

    async with farm.client() as client:
        request = asyncio.create_task(
            client.generate(prompt(90, 50), max_tokens=4000, temperature=0.0, ignore_eos=True)
        )
        for _ in range(3):
            await crash(client)
            await asyncio.sleep(2.0)
        with pytest.raises(TwinpoolError, match="3 workers failed") as caught:
            await request
        assert not isinstance(caught.value, Unavailable)
        assert crashes == 3
    await farm.heal()
