"""Workers that stand still (SIGSTOP) look alive to the network: silence ends them, and what they owned is fenced."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from load import FLOOD, all_kinds, check_all_same, flood, prompt

from clusters import Cluster, is_free
from twinpool.results import Status, WorkerStatus


def named(status: Status, name: str) -> WorkerStatus | None:
    return next((worker for worker in status.workers if worker.worker_id == name), None)


async def test_decode_worker_hangs_and_comes_back(farm: Cluster) -> None:
    async with farm.client() as client:
        wanted = await all_kinds(client, 300)

        async def stop() -> None:
            farm.signal("decode-0", signal.SIGSTOP)

        got = await all_kinds(client, 300, after=60, then=stop)
        check_all_same(got, wanted)
        assert sum(answer.usage.redispatches for answer in got) > 0
        # Prefill workers have seen the silence too: nothing is held for the one that stands still.
        await farm.all_free()
        farm.signal("decode-0", signal.SIGCONT)

        def back(status: Status) -> bool:
            worker = named(status, "decode-0")
            return worker is not None and worker.state == "alive" and is_free(status)

        # It aborts what it ran when it was stopped, and serves again without a restart.
        await farm.until(back, 20.0)


async def test_router_hangs_and_its_streams_go_on(farm: Cluster) -> None:
    """Workers take it for dead and abort; it finds its sessions closed, which is no crash of theirs, and goes on."""
    async with farm.client() as client:
        wanted = await all_kinds(client, 300)

        async def pause() -> None:
            farm.signal("router", signal.SIGSTOP)
            await asyncio.sleep(3.0)
            farm.signal("router", signal.SIGCONT)

        got = await all_kinds(client, 300, after=60, then=pause)
        check_all_same(got, wanted)
        assert sum(answer.usage.redispatches for answer in got) > 0
        await farm.all_free()


async def test_prefill_worker_hangs_while_decode_reads(farm: Cluster) -> None:
    prompts = [prompt(number, 2400) for number in range(41, 47)]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    async with farm.client() as client:
        wanted = [await client.generate(ids, cache_salt="calm", **options) for ids in prompts]
        running = flood(client, prompts, **options)
        # Decode reads the first chunks while the rest is computed.
        await farm.until(lambda status: any(worker.loading for worker in status.workers))
        stopped = await farm.busy("prefill")
        farm.signal(stopped, signal.SIGSTOP)
        got = await asyncio.gather(*running)
        check_all_same(got, wanted * FLOOD)
        assert sum(answer.usage.redispatches for answer in got) > 0
        # Its reads are fenced, so the destinations are free although it never answered.
        status = await farm.all_free()
        assert all(worker.state == "alive" for worker in status.workers if worker.role == "decode")
        farm.signal(stopped, signal.SIGCONT)

        def back(status: Status) -> bool:
            links = [link for w in status.workers for link in w.links if link.prefill_worker == stopped]
            return len(links) == 2 and all(link.linked for link in links) and is_free(status)

        await farm.until(back, 20.0)
        again = [await client.generate(ids, cache_salt="after", **options) for ids in prompts[:2]]
        check_all_same(again, wanted[:2])
