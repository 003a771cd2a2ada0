"""Seven blocks per pool: bursts, growth, prompts that can never fit, and cancels in every state."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from load import check_all_same, prompt

from clusters import Cluster
from twinpool.errors import InvalidRequest
from twinpool.results import Completion, Status

BLOCK = 256
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running_pools(tmp_path_factory: pytest.TempPathFactory, long_llama: Path, pace: dict[str, object]) -> Iterator[Any]:
    # Over TCP a source must take part in every read, so that a stopped one really leaves reads hanging.
    settings: dict[str, object] = {**pace, "model.dtype": "float32", "transport.ucx_tls": "tcp,self"}
    for pool in ("prefill", "decode"):
        settings[f"{pool}.engine.block_size"] = BLOCK
        settings[f"{pool}.engine.num_blocks"] = 8  # the null block is one
        settings[f"{pool}.engine.prefill_chunk"] = 64
    cluster = Cluster.of(tmp_path_factory.mktemp("pools"), long_llama, settings=settings)
    try:
        cluster.launch_all()
        asyncio.run(cluster.ready())
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def pools(running_pools: Cluster) -> Cluster:
    await running_pools.heal()
    return running_pools


def state(status: Status, role: str) -> tuple[int, int, int, int]:
    """(running, waiting, loading, held) of the pool's worker."""
    worker = next(worker for worker in status.workers if worker.role == role)
    return worker.running, worker.waiting, worker.loading, worker.held


async def cancelled(*tasks: asyncio.Task[Completion]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_bursts_of_all_sizes_end_and_are_right(pools: Cluster) -> None:
    draw = random.Random(3)
    asked = [
        (prompt(number, draw.choice([1, 100, 255, 256, 257, 700, 1200])), draw.choice([1, 2, 30]))
        for number in range(24)
    ]
    async with pools.client() as client:
        wanted = [await client.generate(ids, max_tokens=limit, **GREEDY) for ids, limit in asked]
        got = await asyncio.gather(*(client.generate(ids, max_tokens=limit, **GREEDY) for ids, limit in asked))
        check_all_same(got, wanted)
        await pools.all_free()


async def test_two_requests_fill_seven_blocks_and_answers_outgrow_them(pools: Cluster) -> None:
    asked = [prompt(100 + number, 700) for number in range(2)] + [prompt(110 + number, 200) for number in range(3)]
    async with pools.client() as client:
        wanted = [await client.generate(ids, max_tokens=700, **GREEDY) for ids in asked]
        got = await asyncio.gather(*(client.generate(ids, max_tokens=700, **GREEDY) for ids in asked))
        check_all_same(got, wanted)
        assert sum(answer.usage.preemptions for answer in got) > 0
        await pools.all_free()


async def test_a_prompt_that_can_never_fit_is_refused_at_once(pools: Cluster) -> None:
    ids = prompt(1, 7 * BLOCK)
    async with pools.client() as client:
        with pytest.raises(InvalidRequest, match=str(7 * BLOCK)):
            await client.generate(ids, max_tokens=1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pools.http_port}", timeout=60) as http:
        answer = await http.post("/v1/completions", json={"model": "", "prompt": ids, "max_tokens": 1})
        assert answer.status_code == 400, answer.text
    await pools.all_free()


async def test_cancel_in_each_state(pools: Cluster) -> None:
    """One runs on decode, one is held because decode is full, one is queued because prefill is full."""

    async def until(role: str, condition: Callable[[tuple[int, int, int, int]], bool]) -> None:
        await pools.until(lambda status: condition(state(status, role)))

    async with pools.client() as client:

        def ask(seed: int) -> asyncio.Task[Completion]:
            return asyncio.create_task(client.generate(prompt(seed, 1020), max_tokens=700, **GREEDY))

        for order in ((2, 1, 0), (0, 1, 2), (1, 2, 0)):
            first = ask(120)
            await until("decode", lambda s: s[0] == 1)
            second = ask(121)
            await until("prefill", lambda s: s[3] == 1)
            third = ask(122)
            await until("prefill", lambda s: s[1] == 1)
            for index in order:
                await cancelled((first, second, third)[index])
            await pools.all_free()
        probe = await client.generate(prompt(123, 100), max_tokens=3, **GREEDY)
        assert probe.usage.redispatches == 0


async def test_cancel_while_reads_hang(pools: Cluster) -> None:
    """The source stands still for a moment: destinations are kept until its reads have ended, then freed."""
    ids = prompt(130, 1700)
    async with pools.client() as client:
        wanted = await client.generate(ids, max_tokens=5, cache_salt="calm", **GREEDY)
        quarantined = 0
        for attempt in range(20):
            salt = f"attempt {attempt}"
            request = asyncio.create_task(client.generate(ids, max_tokens=5, cache_salt=salt, **GREEDY))
            await asyncio.sleep(0.02 + 0.01 * attempt)
            pools.signal("prefill-0", signal.SIGSTOP)
            await cancelled(request)
            await asyncio.sleep(0.25)
            status = await client.status()
            quarantined = max(quarantined, *(worker.quarantined_blocks for worker in status.workers))
            pools.signal("prefill-0", signal.SIGCONT)
            await pools.heal()
            if quarantined:
                break
        assert quarantined > 0
        got = await client.generate(ids, max_tokens=5, cache_salt="after", **GREEDY)
        check_all_same([got], [wanted])


async def test_two_hundred_cancels_then_a_probe(pools: Cluster) -> None:
    draw = random.Random(7)
    async with pools.client() as client:
        wanted = await client.generate(prompt(140, 300), max_tokens=20, **GREEDY)
        for _ in range(10):
            tasks = [
                asyncio.create_task(
                    client.generate(prompt(draw.randrange(1000), draw.choice([30, 500, 1500])), **GREEDY)
                )
                for _ in range(20)
            ]
            await asyncio.sleep(draw.uniform(0.0, 0.2))
            await cancelled(*tasks)
        got = await client.generate(prompt(140, 300), max_tokens=20, **GREEDY)
        check_all_same([got], [wanted])
        assert got.usage.redispatches == 0
        await pools.all_free()
