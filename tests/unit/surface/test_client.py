"""Both clients against a scripted router: requests, results, errors, retries, deadlines, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

import twinpool
from twinpool import AsyncClient, Client
from twinpool.errors import DeadlineExceeded, InvalidRequest, Overloaded, TwinpoolError, Unavailable
from twinpool.prompt import Message, to_request
from twinpool.proto import inference_pb2 as pb
from twinpool.results import Completion

if TYPE_CHECKING:
    from tests.unit.surface.conftest import ScriptedRouter


def check(result: Completion) -> None:
    assert (result.text, result.token_ids, result.finish_reason) == ("The end.", (5, 6, 7, 8), "stop")
    assert result.usage.remote_tokens == 2
    assert result.usage.transport == "nixl/shm"
    assert result.timings.first_token_s == 0.25
    assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
    assert result.prompt_token_ids == (1, 2)
    assert result.choices[0].stop_reason == "8"


async def in_thread(call: Any, *arguments: Any, **options: Any) -> Any:
    return await asyncio.to_thread(call, *arguments, **options)


async def test_blocking_client(router: ScriptedRouter) -> None:
    def use() -> Completion:
        with Client(router.address, token="hush") as client:
            with client.stream("hello", timeout=5) as stream:
                with pytest.raises(RuntimeError):
                    _ = stream.result
                texts = [chunk.text for chunk in stream]
            assert texts == ["The ", "end", "."]
            assert client.models()[0].max_model_len == 64
            assert client.status().workers[0].links[0].transport == "nixl/shm"
            return stream.result

    check(await in_thread(use))
    assert router.metadata[0]["authorization"] == "Bearer hush"
    assert router.time_left[0] is not None
    assert 0 < router.time_left[0] <= 5


async def test_async_client(router: ScriptedRouter) -> None:
    async with AsyncClient(router.address) as client:
        check(result := await client.generate([1, 2], request_id="mine"))
        assert result.request_id == "mine"
        assert (await client.generate("x")).request_id == "made-1"
        assert (await client.models())[0].id == "tiny"
        assert (await client.status()).in_flight == 2
        await client.chat("Who?", temperature=0)
    assert list(router.requests[0].token_ids.ids) == [1, 2]
    assert router.requests[2].messages.messages[0] == pb.ChatMessage(role="user", content="Who?")


async def test_choices_are_kept_apart(router: ScriptedRouter) -> None:
    async def two(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(index=1, text="b")
        yield pb.GenerateResponse(index=0, text="a")
        yield pb.GenerateResponse(index=1, text="B", finish_reason=pb.FINISH_REASON_LENGTH)
        yield pb.GenerateResponse(index=0, text="A", finish_reason=pb.FINISH_REASON_STOP)

    router.script = two
    async with AsyncClient(router.address) as client:
        choices = (await client.generate("x", n=2)).choices
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("aA", "stop"), ("bB", "length")]


@pytest.mark.parametrize("error", [InvalidRequest("top_p is 7", "sampling.top_p"), Overloaded("full", 2.5)])
async def test_errors_keep_class_and_details(router: ScriptedRouter, error: TwinpoolError) -> None:
    async def fail(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise error
        yield

    router.script = fail
    async with AsyncClient(router.address) as client:
        with pytest.raises(type(error)) as caught:
            await client.generate("x")
    assert vars(caught.value) == vars(error)
    with pytest.raises(type(error)):
        await in_thread(Client(router.address).generate, "x")
    assert len(router.requests) == 2


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_unavailable_is_retried_while_the_caller_has_seen_nothing(router: ScriptedRouter, kind: str) -> None:
    async def generate() -> Completion:
        if kind == "blocking":
            return await in_thread(Client(router.address).generate, "x")
        async with AsyncClient(router.address) as client:
            return await client.generate("x")

    async def early(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        if len(router.requests) < 3:
            raise Unavailable("no worker")
        yield pb.GenerateResponse(text="late", finish_reason=pb.FINISH_REASON_STOP)

    router.script = early
    assert (await generate()).text == "late"
    assert len(router.requests) == 3

    async def halfway(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="half")
        if len(router.requests) < 5:
            raise Unavailable("gone")
        yield pb.GenerateResponse(text="whole", finish_reason=pb.FINISH_REASON_STOP)

    router.script = halfway
    assert (await generate()).text == "halfwhole"
    assert len(router.requests) == 5


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_a_stream_that_has_begun_is_not_asked_for_again(router: ScriptedRouter, kind: str) -> None:
    async def halfway(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="half")
        raise Unavailable("gone")

    router.script = halfway

    async def read() -> None:
        if kind == "blocking":
            await in_thread(lambda: list(Client(router.address).stream("x")))
        async with AsyncClient(router.address) as client:
            async for _ in client.stream("x"):
                pass

    with pytest.raises(Unavailable, match="gone"):
        await read()
    assert len(router.requests) == 1


async def test_retries_are_bounded(router: ScriptedRouter) -> None:
    async def never(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise Unavailable("no worker")
        yield

    router.script = never
    async with AsyncClient(router.address, max_retries=1) as client:
        with pytest.raises(Unavailable):
            await client.generate("x")
    assert len(router.requests) == 2


async def wait_for_ever(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text="a")
    await asyncio.Event().wait()


async def test_timeout_is_a_deadline(router: ScriptedRouter) -> None:
    router.script = wait_for_ever
    async with AsyncClient(router.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x", timeout=0.3)


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_leaving_a_stream_early_cancels_the_request(router: ScriptedRouter, kind: str) -> None:
    router.script = wait_for_ever

    def leave() -> None:
        with Client(router.address) as client, client.stream("x") as stream:
            assert next(iter(stream)).text == "a"

    if kind == "blocking":
        await in_thread(leave)
    else:
        async with AsyncClient(router.address) as client, client.stream("x") as stream:
            async for _ in stream:
                break
    async with asyncio.timeout(10):
        while router.cancelled == 0:
            await asyncio.sleep(0.01)


async def test_no_router_says_where_and_what_to_do() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1; start one \(twinpool up\)"):
            await client.generate("x")


def test_options_reach_their_fields() -> None:
    request = to_request(
        [Message(role="user", content="hi")],
        {
            "temperature": 0,
            "seed": 3,
            "logit_bias": {5: -1.0},
            "stop": "END",
            "max_tokens": 9,
            "json_schema": "{}",
            "logprobs": 0,
            "priority": -1,
            "model": "tiny",
        },
    )
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert request.sampling.logit_bias == {5: -1.0}
    assert list(request.stopping.stop) == ["END"]
    assert request.structured_output.json_schema == "{}"
    assert request.response.HasField("logprobs")
    assert not request.response.HasField("prompt_logprobs")
    assert request.response.token_ids
    assert (request.priority, request.model, request.stopping.max_tokens) == (-1, "tiny", 9)
    assert to_request("x", {"choice": ["a", "b"]}).structured_output.choice.values == ["a", "b"]
    assert to_request([], {}).WhichOneof("prompt") == "token_ids"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown option max_token"):
        to_request("x", {"max_token": 3})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="not a mixture"):
        to_request([1, Message(role="user", content="x")], {})  # type: ignore[list-item]


def test_clients_are_exported_lazily() -> None:
    assert twinpool.Client is Client
    with pytest.raises(AttributeError):
        _ = twinpool.Klient  # type: ignore[attr-defined]
