"""Seven blocks per pool: bursts, growth, prompts that can never fit, cancels in every state, reads that hang."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import still_source
import unhurried_worker
from load import check_all_same, prompt, stream

from clusters import Cluster
from twinpool.errors import InvalidRequest
from twinpool.results import Completion, Status

BLOCK = 256
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running_pools(tmp_path_factory: pytest.TempPathFactory, long_llama: Path, pace: dict[str, object]) -> Iterator[Any]:
    # Over TCP a source must take part in every read, so that one that stands still leaves reads hanging.
    settings: dict[str, object] = {**pace, "model.dtype": "float32", "transport.ucx_tls": "tcp,self"}
    for pool in ("prefill", "decode"):
        settings[f"{pool}.engine.block_size"] = BLOCK
        settings[f"{pool}.engine.num_blocks"] = 8  # the null block is one
        settings[f"{pool}.engine.prefill_chunk"] = 64
    cluster = Cluster.of(tmp_path_factory.mktemp("pools"), long_llama, settings=settings)
    cluster.entries["prefill-0"] = Path(still_source.__file__)
    cluster.entries["decode-0"] = Path(unhurried_worker.__file__)
    with cluster.running():
        yield cluster


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

        # A fast machine would be through with an answer before all three were seen in their states.
        pools.signal("decode-0", signal.SIGUSR1)
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
        pools.signal("decode-0", signal.SIGUSR2)
        probe = await client.generate(prompt(123, 100), max_tokens=3, **GREEDY)
        assert probe.usage.redispatches == 0


async def hanging(pools: Cluster, **options: Any) -> asyncio.Task[Completion]:
    """A request whose first token has come, and whose KV decode reads from a source that stands still."""
    arrived = asyncio.Event()

    async def note() -> None:
        arrived.set()

    async def ask() -> Completion:
        async with pools.client() as client:
            return await stream(client, prompt(130, 1700), after=1, then=note, max_tokens=5, **GREEDY, **options)

    pools.signal("prefill-0", signal.SIGUSR1)
    request = asyncio.create_task(ask())
    await asyncio.wait_for(arrived.wait(), 60)
    await pools.until(lambda status: state(status, "decode")[2] == 1)
    return request


async def test_cancel_while_reads_hang(pools: Cluster) -> None:
    """Destinations are kept until their reads have ended, then freed."""
    async with pools.client() as client:
        wanted = await client.generate(prompt(130, 1700), max_tokens=5, cache_salt="calm", **GREEDY)
        request = await hanging(pools, cache_salt="cancelled")
        await cancelled(request)
        status = await pools.until(lambda status: sum(w.quarantined_blocks for w in status.workers) > 0)
        decode = next(worker for worker in status.workers if worker.role == "decode")
        assert decode.total_blocks - decode.free_blocks == decode.quarantined_blocks == 7
        pools.signal("prefill-0", signal.SIGUSR2)
        await pools.all_free()
        got = await client.generate(prompt(130, 1700), max_tokens=5, cache_salt="after", **GREEDY)
        check_all_same([got], [wanted])


async def test_the_source_dies_under_a_read(pools: Cluster) -> None:
    """Its reads fail, so the destinations are free; the request goes on from its first token once it is back."""
    async with pools.client() as client:
        wanted = await client.generate(prompt(130, 1700), max_tokens=5, cache_salt="calm", **GREEDY)
        request = await hanging(pools, cache_salt="killed")
        pools.kill("prefill-0")
        pools.launch("prefill-0")
        got = await request
        check_all_same([got], [wanted])
        assert got.usage.redispatches >= 1
        await pools.heal()


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
