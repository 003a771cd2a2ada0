"""Processes come back at their old address: the new identity is used at once, the old one never."""

from __future__ import annotations

import asyncio

from load import all_kinds, check_all_same, prompt, stream

from clusters import Cluster
from twinpool import AsyncClient
from twinpool.errors import Unavailable


async def test_workers_restart_with_another_number_of_blocks(farm: Cluster) -> None:
    async with farm.client() as client:
        wanted = await all_kinds(client, 40)
        farm.overrides["prefill-0"] = {"prefill.engine.num_blocks": 300}
        farm.overrides["decode-0"] = {"decode.engine.num_blocks": 250}
        for name in ("prefill-0", "decode-0"):
            farm.kill(name)
            farm.launch(name)
        # Sent while they are still away, and again as soon as they are back.
        check_all_same(await all_kinds(client, 40), wanted)
        status = await farm.heal()
        blocks = {worker.worker_id: worker.total_blocks for worker in status.workers}
        assert (blocks["prefill-0"], blocks["decode-0"]) == (299, 249)
        check_all_same(await all_kinds(client, 40), wanted)
        # Prompts that no worker has cached: all workers take some.
        got = await asyncio.gather(*(client.generate(prompt(number, 300), max_tokens=40) for number in range(60, 84)))
        assert not any(answer.usage.redispatches for answer in got)
        assert {answer.prefill_worker for answer in got} == {"prefill-0", "prefill-1"}
        assert {answer.decode_worker for answer in got} == {"decode-0", "decode-1"}
        await farm.all_free()


async def test_router_dies_and_its_requests_with_it(farm: Cluster) -> None:
    """Clients get UNAVAILABLE, workers abort within the dead interval, a new router finds them free."""
    ids = prompt(51, 200)
    async with farm.client() as client:
        wanted = await client.generate(ids, max_tokens=50, temperature=0.0, ignore_eos=True)
    async with AsyncClient(farm.address, max_retries=0) as client:
        started = asyncio.Event()

        async def kill() -> None:
            started.set()

        cut = [
            asyncio.create_task(
                stream(client, prompt(60 + i, 100), max_tokens=3000, ignore_eos=True, after=5, then=kill)
            )
            for i in range(6)
        ]
        await started.wait()
        farm.kill("router")
        results = await asyncio.gather(*cut, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results), results
    farm.launch("router")
    await farm.ready()
    await farm.all_free(5.0)
    async with farm.client() as client:
        again = await client.generate(ids, max_tokens=50, temperature=0.0, ignore_eos=True)
        assert again.token_ids == wanted.token_ids
