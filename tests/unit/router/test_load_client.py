"""The load client against a router: both surfaces, both loops, failures."""

from __future__ import annotations

from typing import Any

from twinpool import AsyncClient
from twinpool.bench.openai_target import OpenAITarget
from twinpool.bench.target import GrpcTarget, run_closed, run_open
from twinpool.bench.workload import Ask


async def test_both_surfaces_and_loops(make_cluster: Any) -> None:
    async with make_cluster("hello world") as cluster:
        await cluster.router.wait_ready()
        asks = [Ask([1, 2, 3], 4) for _ in range(6)] + [Ask("ab", 4)]
        for target in (
            GrpcTarget(AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}")),
            OpenAITarget(cluster.http_url, "tiny"),
        ):
            for timelines in (
                await run_closed(target, asks, 3),
                await run_open(target, asks, [0.01 * number for number in range(7)], most=2),
            ):
                assert [timeline.error for timeline in timelines] == [""] * 7
                assert [timeline.tokens for timeline in timelines] == [4] * 7
                assert sorted(timeline.prompt_tokens for timeline in timelines) == [2] + [3] * 6
                for timeline in timelines:
                    assert timeline.sent <= timeline.pieces[0] <= timeline.pieces[-1] <= timeline.ended
            await target.close()


async def test_failures_are_results(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        await cluster.router.wait_ready()
        wrong = OpenAITarget(cluster.http_url, "another model")
        assert "HTTP 404" in (await wrong.ask(Ask([1], 1))).error
        await wrong.close()
        gone = OpenAITarget("http://127.0.0.1:1", "tiny")
        assert "ClientConnector" in (await gone.ask(Ask([1], 1))).error
        await gone.close()
        refused = GrpcTarget(AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}", max_retries=0))
        assert "invalid_request" in (await refused.ask(Ask([1] * 600, 1))).error
        await refused.close()
