"""Wrong requests by the thousand over HTTP and gRPC: each gets its code, nothing stays behind, nothing breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import httpx
import pytest
from fuzz import Fuzzer

from twinpool.proto import inference_pb2 as pb

PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3, "stream": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}
GENERATE = "/twinpool.inference.v1.InferenceService/Generate"
# What a wrong request may be answered with; a senseless one may also be right by chance.
HTTP_CODES = {200, 400, 404, 413, 422, 429}
GRPC_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
LANES = 8


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_wrong_requests(make_cluster: Any, count: int) -> None:
    async with make_cluster("hello") as cluster:
        await cluster.router.wait_ready()
        http = await asyncio.gather(*(_http(cluster, seed, count // 2 // LANES) for seed in range(LANES)))
        rpc = await asyncio.gather(*(_grpc(cluster, seed, count // 2 // LANES) for seed in range(LANES)))
        statuses, codes = sum(http, Counter[int]()), sum(rpc, Counter[grpc.StatusCode]())
        assert set(statuses) <= HTTP_CODES, statuses
        assert set(codes) <= GRPC_CODES, codes
        assert statuses[400] > count // 8
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > count // 8
        await cluster.idle()
        assert not any(session._sinks for session in cluster.router.registry.sessions)
        assert cluster.router.admission.queued == 0
        whole = [part.text async for part in cluster.stub.Generate(pb.GenerateRequest(text="x"))]
        assert "".join(whole) == "hello"


async def _http(cluster: Any, seed: int, count: int) -> Counter[int]:
    fuzzer, found = Fuzzer(seed), Counter[int]()
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=20) as client:
        for _ in range(count):
            path = fuzzer.random.choice(list(PATHS))
            answer = await client.post(path, content=fuzzer.json(PATHS[path]))
            found[answer.status_code] += 1
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
    return found


async def _grpc(cluster: Any, seed: int, count: int) -> Counter[grpc.StatusCode]:
    fuzzer, found = Fuzzer(seed), Counter[grpc.StatusCode]()
    call = cluster.channel.unary_stream(GENERATE)
    for _ in range(count):
        data = fuzzer.message(pb.GenerateRequest).SerializeToString()
        made = call(fuzzer.damage(data) if fuzzer.random.random() < 0.5 else data, timeout=20)
        try:
            async for _part in made:
                pass
        except grpc.aio.AioRpcError:
            pass
        found[await made.code()] += 1
    return found
