"""What a scrape of the router shows after a request and a worker's restart."""

from __future__ import annotations

from typing import Any

import httpx

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_scrape_tells_of_requests_batches_and_restarts(make_cluster: Any) -> None:
    async with make_cluster("hello") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()

        async def scrape() -> dict[str, float]:
            lines = (await client.get("/metrics")).text.splitlines()
            return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x[0] != "#")}

        decode = cluster.workers[1]
        decode.totals.batches, decode.totals.batch_requests, decode.totals.batch_s = 4, 12, 0.5
        seen = cluster.router.registry.session_of(("decode-0", decode.epoch))
        await cluster.until(lambda: seen.report.totals.batches == 4)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        shown = await scrape()
        assert shown["twinpool_router_time_per_output_token_seconds_count"] == 1
        assert shown["twinpool_router_ready"] == 1
        of_decode = '{role="decode",worker="decode-0"}'
        assert shown[f"twinpool_worker_batches_total{of_decode}"] == 4
        assert shown[f"twinpool_worker_batch_requests_total{of_decode}"] == 12
        assert shown[f"twinpool_worker_step_seconds_total{of_decode}"] == 0.5
        assert shown[f"twinpool_worker_restarts_total{of_decode}"] == 0
        await decode.kill()
        await cluster.until(lambda: not seen.usable)
        assert (await scrape())["twinpool_router_ready"] == 0
        await decode.restart()
        await cluster.until(lambda: seen.usable)
        assert (await scrape())[f"twinpool_worker_restarts_total{of_decode}"] == 1
