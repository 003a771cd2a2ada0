"""Workers die by kill -9: no request fails, no token differs, nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

from load import all_kinds, check_all_same, check_same, prompt

from clusters import Cluster


async def test_decode_worker_dies_in_the_middle_of_many_streams(farm: Cluster) -> None:
    async with farm.client() as client:
        wanted = await all_kinds(client, 300)
        killed: list[str] = []

        async def kill() -> None:
            killed.append(await farm.busy("decode"))
            farm.kill(killed[0])

        got = await all_kinds(client, 300, after=60, then=kill)
        check_all_same(got, wanted)
        assert sum(answer.usage.redispatches for answer in got) > 0
        (survivor,) = {"decode-0", "decode-1"} - set(killed)
        assert {answer.decode_worker for answer in got if answer.usage.redispatches} == {survivor}
        await farm.all_free()
        found = await farm.metrics()
        assert found['twinpool_router_redispatches_total{reason="worker_lost"}'] > 0
        assert found[f'twinpool_worker_up{{role="decode",worker="{killed[0]}"}}'] == 0
        decode = f'{{role="decode",worker="{survivor}"}}'
        assert found[f"twinpool_worker_transfer_bytes_total{decode}"] > 0
        assert found[f"twinpool_worker_transfer_seconds_total{decode}"] > 0
        assert found[f"twinpool_worker_quarantined_blocks{decode}"] == 0
        confirmed = found[f'twinpool_worker_transfers_total{{outcome="confirmed",worker="{survivor}"}}']
        assert confirmed >= sum(answer.usage.redispatches > 0 for answer in got)
        released = [value for name, value in found.items() if 'holds_total{outcome="released"' in name]
        assert len(released) == 2
        assert sum(released) >= confirmed


async def test_prefill_worker_dies_while_it_computes_and_while_decode_reads(farm: Cluster) -> None:
    """Two of the prompts are equal: both wait for the same blocks."""
    prompts = [prompt(number, 2400) for number in (31, 32, 33, 33, 34, 35)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0}
    async with farm.client() as client:
        wanted = [await client.generate(ids, cache_salt="calm", **options) for ids in prompts]
        running = [asyncio.create_task(client.generate(ids, cache_salt="disturbed", **options)) for ids in prompts]
        farm.kill(await farm.busy("prefill"))
        got = await asyncio.gather(*running)
        for mine, theirs in zip(got, wanted, strict=True):
            check_same(mine, theirs)
            assert [p.token_id for p in mine.prompt_logprobs] == [p.token_id for p in theirs.prompt_logprobs]
        assert sum(answer.usage.redispatches for answer in got) > 0
        await farm.all_free()


async def test_prefill_workers_die_once_the_kv_is_read(farm: Cluster) -> None:
    """Streams do not notice; and while no prefill worker is left, they can still be continued on decode."""
    async with farm.client() as client:
        wanted = await all_kinds(client, 400)
        undisturbed = asyncio.Event()

        async def kill() -> None:
            await farm.until(lambda status: all(not (w.loading or w.waiting) for w in status.workers))
            farm.kill("prefill-0")
            farm.kill("prefill-1")
            undisturbed.set()

        got = await all_kinds(client, 400, after=30, then=kill)
        assert undisturbed.is_set()
        check_all_same(got, wanted)
        assert not any(answer.usage.redispatches for answer in got)
        await farm.all_free()
