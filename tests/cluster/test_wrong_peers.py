"""Workers' internal ports: nobody without the token, and nonsense from peers that have it breaks nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz import Fuzzer

from twinpool.proto import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from twinpool.rpc import PROTOCOL_VERSION, channel

TOKEN = "hush"
SETTINGS = {"session.token": TOKEN, "prefill.engine.num_blocks": 64, "decode.engine.num_blocks": 64}
WELCOMED_S = 5.0


def worker_messages(fuzzer: Fuzzer) -> AsyncIterator[worker_pb2.SessionRequest]:
    hello = worker_pb2.Hello(router_id=f"router-{fuzzer.random.random()}", epoch=1, protocol=PROTOCOL_VERSION)
    return _messages(fuzzer, worker_pb2.SessionRequest(hello=hello), worker_pb2.SessionRequest)


async def _messages(fuzzer: Fuzzer, first: Any, kind: Any, count: int = 40) -> AsyncIterator[Any]:
    if fuzzer.random.random() < 0.9:
        yield first
    names = [field.name for field in kind.DESCRIPTOR.fields]
    for _ in range(count):
        name = fuzzer.random.choice(names)
        field = kind.DESCRIPTOR.fields_by_name[name]
        message = fuzzer.message(field.message_type._concrete_class)
        if isinstance(message, worker_pb2.Order) and message.HasField("drain"):
            continue  # a peer that may drain a worker may do so
        yield kind(**{name: message})
        await asyncio.sleep(0)


async def converse(method: Any, messages: AsyncIterator[Any]) -> grpc.StatusCode:
    """Says all of it and reads what comes for a moment."""
    call = method(messages, timeout=WELCOMED_S)
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(0.3):
            async for _ in call:
                pass
    call.cancel()
    return await call.code()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12, 250])
async def test_nonsense_of_authenticated_peers(tiny_llama: Path, start_cluster: Any, rounds: int) -> None:
    async with start_cluster(tiny_llama, settings=SETTINGS) as cluster:
        async with cluster.client() as client:
            right = (await client.generate([1, 2, 3], max_tokens=5, temperature=0.0, ignore_eos=True)).token_ids
        prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
        hello = await kv_hello(f"127.0.0.1:{prefill.kv_port}")
        for seed in range(rounds):
            fuzzer = Fuzzer(seed)
            async with (
                channel(prefill.address, TOKEN) as one,
                channel(decode.address, TOKEN) as two,
                channel(f"127.0.0.1:{prefill.kv_port}", TOKEN) as kv,
            ):
                first = kv_pb2.SessionRequest(hello=hello)
                if fuzzer.random.random() < 0.3:
                    first.hello.MergeFrom(fuzzer.message(kv_pb2.Hello))
                exchange = _messages(fuzzer, first, kv_pb2.SessionRequest)
                await asyncio.gather(
                    converse(worker_pb2_grpc.WorkerServiceStub(one).Session, worker_messages(fuzzer)),
                    converse(worker_pb2_grpc.WorkerServiceStub(two).Session, worker_messages(fuzzer)),
                    converse(kv_pb2_grpc.KvServiceStub(kv).Session, exchange),
                )
        for node in cluster.nodes.values():
            assert node.process is not None
            assert node.process.poll() is None, cluster.log(node.name)[-3000:]
        await cluster.ready()
        async with cluster.client() as client:
            again = await client.generate([1, 2, 3], max_tokens=5, temperature=0.0, ignore_eos=True)
        assert again.token_ids == right
        await cluster.all_free()
        for name in ("prefill-0", "decode-0"):
            log = cluster.log(name)
            assert "Traceback" not in log, log[log.index("Traceback") - 300 :][:3000]


async def kv_hello(address: str) -> kv_pb2.Hello:
    """What a decode worker of this deployment would say; refusals tell the worker's own values one by one."""
    hello = kv_pb2.Hello(worker_id="decode-x", epoch=7, protocol=PROTOCOL_VERSION)
    for field, name in (("revision", "model revision"), ("layout_text", "KV layout"), ("connector", "connector")):
        refusal = await refusal_of(address, hello)
        setattr(hello, field, refusal.split(f"{name} is ", 1)[1].split(" here and ", 1)[0])
    assert "describes ranks" in await refusal_of(address, hello)
    hello.ranks.add(layer_end=1, head_end=1, num_blocks=64)
    return hello


async def refusal_of(address: str, hello: kv_pb2.Hello) -> str:
    async with channel(address, TOKEN) as opened:
        call = kv_pb2_grpc.KvServiceStub(opened).Session(iter([kv_pb2.SessionRequest(hello=hello)]), timeout=10)
        assert await _code(call) is grpc.StatusCode.FAILED_PRECONDITION
        return str(await call.details())


async def test_every_internal_port_asks_for_the_token(tiny_llama: Path, start_cluster: Any) -> None:
    async with start_cluster(tiny_llama, settings=SETTINGS) as cluster:
        prefill, decode = cluster.nodes["prefill-0"], cluster.nodes["decode-0"]
        hello = worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION))
        for token in (None, "wrong"):
            for address in (prefill.address, decode.address):
                async with channel(address, token) as opened:
                    assert await _code(worker_pb2_grpc.WorkerServiceStub(opened).Session(iter([hello]))) is _DENIED
            async with channel(f"127.0.0.1:{prefill.kv_port}", token) as opened:
                request = kv_pb2.SessionRequest(hello=kv_pb2.Hello(protocol=PROTOCOL_VERSION))
                assert await _code(kv_pb2_grpc.KvServiceStub(opened).Session(iter([request]))) is _DENIED


_DENIED = grpc.StatusCode.UNAUTHENTICATED


async def _code(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.read()
    return await call.code()
