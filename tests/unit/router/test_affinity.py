"""A router's beliefs about caches, end to end: events of real sessions steer requests, restarts clear them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from twinpool.block_hash import chain_hashes, chain_root, short_name
from twinpool.proto import inference_pb2 as pb
from twinpool.proto import worker_pb2

PROMPT = [1 + i % 200 for i in range(400)]


def names(tokens: list[int]) -> list[int]:
    return [short_name(item) for item in chain_hashes(chain_root("rev", "", ""), tokens, 16)]


def tell(worker: Any, **events: Any) -> None:
    worker.outbox.put(worker_pb2.SessionResponse(cache=worker_pb2.CacheEvents(**events)))


async def ask(cluster: Any, tokens: list[int], **fields: Any) -> pb.GenerateResponse:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), **fields)
    async with asyncio.timeout(10):
        return [message async for message in cluster.stub.Generate(request)][-1]


async def linked(cluster: Any) -> None:
    """Every decode worker has reported its links to all prefill workers that live now."""
    epochs = {worker.epoch for worker in cluster.workers if worker.role == "prefill"}

    def whole() -> bool:
        views = cluster.router.registry.views()
        links = [{link.epoch for link in view.report.links} for view in views if view.info.role == "decode"]
        return len(views) == len(cluster.workers) and all(found == epochs for found in links)

    await cluster.until(whole)


def known(cluster: Any, worker: Any) -> int:
    view = next(v for v in cluster.router.registry.views() if v.info.worker_id == worker.worker_id)
    return int(view.cached_blocks)


async def test_a_prompt_goes_where_its_prefix_is_until_the_worker_restarts(make_cluster: Any) -> None:
    async with make_cluster("ok", prefills=2) as cluster:
        await linked(cluster)
        second = cluster.workers[1]
        tell(second, reset=True, stored=names(PROMPT))
        await cluster.until(lambda: known(cluster, second) == 25)
        assert (await ask(cluster, [*PROMPT, 7, 8])).prefill_worker == "prefill-1"
        tell(second, removed=names(PROMPT))
        await cluster.until(lambda: known(cluster, second) == 0)
        tell(second, stored=names(PROMPT))
        await cluster.until(lambda: known(cluster, second) == 25)
        await second.kill()
        await cluster.until(lambda: len(cluster.router.registry.views()) == 2)
        await second.restart()
        await linked(cluster)
        assert known(cluster, second) == 0


async def test_a_twin_follows_a_request_whose_events_have_not_come(make_cluster: Any) -> None:
    async with make_cluster("ok", prefills=2) as cluster:
        await linked(cluster)
        first, second = cluster.workers[:2]
        for worker in (first, second):
            tell(worker, stored=[1])  # they do cache
        await cluster.until(lambda: known(cluster, first) == known(cluster, second) == 1)
        tell(second, stored=names(PROMPT[:80]))
        await cluster.until(lambda: known(cluster, second) == 6)
        assert (await ask(cluster, PROMPT)).prefill_worker == "prefill-1"
        tell(first, stored=names(PROMPT)[:8])  # more than what is known of the second, less than what is expected there
        await cluster.until(lambda: known(cluster, first) == 9)
        assert (await ask(cluster, PROMPT)).prefill_worker == "prefill-1"


async def test_another_salt_is_another_prefix(make_cluster: Any) -> None:
    async with make_cluster("ok", prefills=2) as cluster:
        await linked(cluster)
        tell(cluster.workers[1], reset=True, stored=names(PROMPT))
        await cluster.until(lambda: known(cluster, cluster.workers[1]) == 25)
        assert (await ask(cluster, PROMPT, cache_salt="other")).prefill_worker == "prefill-0"


@pytest.mark.parametrize(("cached", "computed"), [(True, "decode-0 computes 2"), (False, "prefill-0 computes 402")])
async def test_auto_keeps_what_decode_has_cached_and_says_why(make_cluster: Any, cached: bool, computed: str) -> None:
    async with make_cluster("ok", disaggregate="auto") as cluster:
        await linked(cluster)
        decode = cluster.workers[1]
        tell(decode, reset=True, stored=names(PROMPT) if cached else [1])
        await cluster.until(lambda: known(cluster, decode) > 0)
        last = await ask(cluster, [*PROMPT, 7, 8])
        assert last.prefill_worker == ("" if cached else "prefill-0")
        assert f"{computed} of 402 tokens" in last.usage.route_reason
        text = cluster.router.intake._context.metrics.exposition(0, 0, {}).decode()
        path = "decode_only" if cached else "disaggregated"
        assert f'twinpool_router_routes_total{{cause="cheaper",path="{path}"}} 1.0' in text
        assert 'twinpool_router_prefill_estimate_seconds{part="per_token",role="decode",worker="decode-0"}' in text
        assert 'twinpool_router_handover_estimate_seconds{part="fixed",prefill_worker="prefill-0",' in text
