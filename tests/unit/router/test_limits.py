"""Bounds on what a request may hold, over HTTP and gRPC; each names the field."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest

from twinpool.errors import InvalidRequest
from twinpool.proto import inference_pb2 as pb
from twinpool.router import http_body
from twinpool.router.http_body import check_shape


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"metadata": [{}] * 10_001}, "objects"),
        ({"prompt": [[1]] * 10_001}, "lists"),
        ({f"k{number}": 1 for number in range(20_001)}, "keys"),
        ({"prompt": [1] * 1_000_002}, "values"),
    ],
)
def test_bodies_with_too_many_values(body: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"more than [0-9]+ {what}"):
        check_shape(json.dumps(body).encode())


@pytest.mark.parametrize("text", ["{[:," * 300_000, '\\"{' * 20_000, "\\\\"])
def test_characters_within_strings_do_not_count(text: str) -> None:
    check_shape(json.dumps({"prompt": text, "n": [1] * 9}).encode())


async def test_limits_over_http(make_cluster: Any) -> None:
    cases = [
        ("/v1/completions", {"prompt": "x", "stop": ["a" * 1025]}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": [1] * 50_000}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 5000}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(n): 1 for n in range(5000)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "a" * 300_000}}, "grammar"),
        ("/v1/completions", {"prompt": "x", "cache_salt": "s" * 2000}, "cache_salt"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ]
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        for path, body, param in cases:
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        deep = await client.post("/v1/completions", content=b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}")
        assert deep.status_code == 400
        assert cluster.router.admission.in_flight == 0


async def test_a_body_that_does_not_come_is_not_waited_for(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "READ_TIMEOUT_S", 0.2)

    async def drip() -> Any:
        yield b'{"prompt": "x"'
        await cluster.router.admission.drain(1)

    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        cluster.router.admission._idle.clear()
        answer = await client.post("/v1/completions", content=drip())
        assert answer.status_code == 408


async def test_unreadable_messages_are_the_senders_fault(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster:
        for method, call in (
            ("InferenceService/Generate", cluster.channel.unary_stream),
            ("InfoService/GetStatus", cluster.channel.unary_unary),
        ):
            made = call(f"/twinpool.inference.v1.{method}")(b"\xff\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (made.read() if method.endswith("Generate") else made)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        giant = pb.GenerateRequest(text="x" * (9 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Generate(giant).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
