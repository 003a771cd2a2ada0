"""SIGTERM and scaling down: nothing fails, and the process ends with exit code 0."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from load import all_kinds, check_all_same, prompt

from clusters import Cluster
from twinpool import AsyncClient
from twinpool.errors import TwinpoolError, Unavailable
from twinpool.results import Completion, Status


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


def steps_of(status: Status) -> dict[str, int]:
    """Engine steps of the connected decode workers that run something."""
    return {w.worker_id: w.steps for w in status.workers if w.role == "decode" and w.state == "alive" and w.running}


@pytest.mark.slow
async def test_the_third_crash_of_the_worker_that_runs_it_ends_a_request(farm: Cluster) -> None:
    """Each worker is killed once it has said something more: what there is to say outlasts three of them."""
    async with farm.client() as client:
        request = asyncio.create_task(
            client.generate(prompt(90, 50), max_tokens=4000, temperature=0.0, ignore_eos=True)
        )
        for _ in range(3):
            [(victim, steps)] = steps_of(await farm.until(lambda status: bool(steps_of(status)), 60.0)).items()
            await farm.until(lambda status, at=(victim, steps): steps_of(status).get(at[0], 0) > at[1])  # type: ignore[misc]
            assert not request.done()
            farm.kill(victim)
            await farm.until(lambda status, name=victim: name not in steps_of(status))  # type: ignore[misc]
            farm.launch(victim)
        with pytest.raises(TwinpoolError, match="3 workers failed") as caught:
            await request
        assert not isinstance(caught.value, Unavailable)
    await farm.heal()
