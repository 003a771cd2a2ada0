"""Whatever happens to requests, both pools end with all blocks free and no exchange open."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from twinpool import AsyncClient

REQUESTS = 200


async def test_two_hundred_mixed_requests(tiny_llama: Path, start_cluster: Any) -> None:
    rng = random.Random(5)
    settings = {"prefill.engine.num_blocks": 120, "decode.engine.num_blocks": 120, "prefill.engine.prefill_chunk": 32}
    async with start_cluster(tiny_llama, settings=settings) as cluster, cluster.client() as client:
        gate = asyncio.Semaphore(24)
        finished = 0

        async def one(seed: int) -> None:
            nonlocal finished
            draw = random.Random(seed)
            prompt = [draw.randrange(1, 250) for _ in range(draw.choice([1, 5, 15, 16, 17, 48, 130, 300]))]
            limit = draw.choice([1, 2, 8, 60])
            async with gate:
                if draw.random() < 0.4:
                    await cancelled_at_random(client, prompt, limit, draw)
                    return
                result = await client.generate(
                    prompt, max_tokens=limit, seed=seed, ignore_eos=True, n=draw.choice([1, 1, 1, 3])
                )
                assert all(len(choice.token_ids) == limit for choice in result.choices)
                finished += 1

        await asyncio.gather(*(one(rng.randrange(1 << 30)) for _ in range(REQUESTS)))
        assert finished > REQUESTS / 3
        status = await cluster.all_free(timeout_s=5.0)
        assert {worker.role for worker in status.workers} == {"prefill", "decode"}


async def cancelled_at_random(client: AsyncClient, prompt: list[int], limit: int, draw: random.Random) -> None:
    """Leaves a stream after a random time or a random number of chunks."""

    async def read() -> None:
        left = draw.randrange(4)
        async with client.stream(prompt, max_tokens=limit, ignore_eos=True) as stream:
            async for _ in stream:
                if left == 0:
                    return
                left -= 1

    task = asyncio.create_task(read())
    await asyncio.wait([task], timeout=draw.uniform(0.0, 0.15))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_full_prefix_hit_reads_nothing_and_frees_everything(tiny_llama: Path, start_cluster: Any) -> None:
    prompt = list(range(1, 65))
    async with start_cluster(tiny_llama) as cluster, cluster.client() as client:
        first = await client.generate(prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
        second = await client.generate(prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
        assert first.token_ids == second.token_ids
        assert (first.usage.remote_tokens, first.usage.decode_cached_tokens) == (64, 0)
        assert (second.usage.remote_tokens, second.usage.decode_cached_tokens) == (0, 64)
        assert second.usage.prefill_cached_tokens == 48  # one token must be computed, so one block is
        await cluster.all_free()
