"""Two routers over one pair of pools share nothing: the end of one costs only its own streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clusters import Node, free_ports
from twinpool import AsyncClient
from twinpool.errors import TwinpoolError

OPTIONS: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
STREAMS = 4


async def test_a_killed_router_takes_only_its_own_streams(tiny_llama: Path, start_cluster: Any) -> None:
    settings = {"decode.engine.speculation": "off"}
    async with start_cluster(tiny_llama, settings=settings) as cluster:
        port, http_port = free_ports(2)
        workers = [node.address for node in cluster.nodes.values() if node.role != "router"]
        other = cluster.nodes["other"] = Node("other", "router", port)
        cluster.overrides["other"] = {"router.http_port": http_port, "router.workers": workers}
        cluster.launch("other")
        async with cluster.client() as kept, AsyncClient(other.address, max_retries=0) as lost:
            expected = [await kept.generate([n + 1] * 20, **OPTIONS) for n in range(STREAMS)]
            await _ready(lost)
            halfway = asyncio.Semaphore(0)

            async def read(client: AsyncClient, number: int) -> list[int]:
                tokens: list[int] = []
                async with client.stream([number + 1] * 20, **OPTIONS) as stream:
                    async for chunk in stream:
                        if len(tokens) < 5 <= len(tokens) + len(chunk.token_ids):
                            halfway.release()
                        tokens += chunk.token_ids
                return tokens

            ours = [asyncio.ensure_future(read(kept, number)) for number in range(STREAMS)]
            theirs = [asyncio.ensure_future(read(lost, number)) for number in range(STREAMS)]
            for _ in range(2 * STREAMS):
                await halfway.acquire()
            cluster.kill("other")
            for task in theirs:
                with pytest.raises(TwinpoolError):
                    await task
            assert await asyncio.gather(*ours) == [list(each.token_ids) for each in expected]
            await cluster.all_free()
            again = await kept.generate([1] * 20, **OPTIONS)
            assert list(again.token_ids) == list(expected[0].token_ids)
            assert again.usage.redispatches == 0


async def _ready(client: AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.status()).ready:
                    return
            except TwinpoolError:
                pass
            await asyncio.sleep(0.1)
