"""The straight path over gRPC: both pools, merging, stop conditions, cancel."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest

from twinpool.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from twinpool.grpc_errors import error_from_rpc
from twinpool.proto import inference_pb2 as pb


async def collect(cluster: Any, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**{"text": "a prompt"} | fields)
    async with asyncio.timeout(10):
        return [message async for message in cluster.stub.Generate(request)]


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(message.text for message in messages if message.index == index)


async def test_disaggregated_answer_with_usage(make_cluster: Any, byte_ids: Any, eos: int) -> None:
    async with make_cluster("hello world") as cluster:
        await cluster.router.wait_ready()
        call = cluster.stub.Generate(
            pb.GenerateRequest(text="a prompt", request_id="mine", response=pb.ResponseOptions(token_ids=True))
        )
        messages = [message async for message in call]
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        assert text_of(messages) == "hello world"
        assert [t for m in messages for t in m.token_ids] == [*byte_ids("hello world"), eos]
        assert list(messages[0].prompt_token_ids) == byte_ids("a prompt")
        assert not any(m.prompt_token_ids for m in messages[1:])
        last = messages[-1]
        assert (last.finish_reason, last.stop_reason) == (pb.FINISH_REASON_STOP, "")
        assert (last.prefill_worker, last.decode_worker) == ("prefill-0", "decode-0")
        usage = last.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.remote_tokens) == (8, 12, 8)
        assert (usage.prefill_computed_tokens, usage.decode_computed_tokens) == (8, 0)
        assert (usage.transport, usage.route_reason, usage.redispatches) == ("fake/loop", "disaggregate: always", 0)
        assert last.timings.total_s >= last.timings.first_token_s > 0
        prefill, decode = (worker.submits for worker in cluster.workers)
        assert prefill[0].attempt_id == decode[0].attempt_id
        assert prefill[0].transfer_id == decode[0].transfer_id != 0
        assert decode[0].prefill_worker == "prefill-0"
        assert decode[0].prefill_epoch == cluster.workers[0].epoch
        assert decode[0].sampling.HasField("seed")
        assert not any(worker.cancels for worker in cluster.workers)


async def test_first_token_does_not_wait_for_decode(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].delay_first = asyncio.Event()

    async with make_cluster("hello", setup=setup) as cluster:
        await cluster.router.wait_ready()
        call = cluster.stub.Generate(pb.GenerateRequest(text="x"))
        assert (await call.read()).text == "h"
        cluster.workers[1].delay_first.set()
        rest = []
        while (message := await call.read()) is not grpc.aio.EOF:
            rest.append(message)
        assert text_of(rest) == "ello"


async def test_last_message_waits_for_the_prefill_account(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[0].delay_first = asyncio.Event()

    async with make_cluster("h", setup=setup) as cluster:
        await cluster.router.wait_ready()
        task = asyncio.create_task(collect(cluster))
        await cluster.eventually(lambda: bool(cluster.workers[1].submits))
        await asyncio.sleep(0.05)
        cluster.workers[0].delay_first.set()
        messages = await task
        assert messages[-1].usage.prefill_computed_tokens == 8


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_max_tokens_is_exact(make_cluster: Any, max_tokens: int) -> None:
    async with make_cluster("hello world") as cluster:
        await cluster.router.wait_ready()
        messages = await collect(cluster, stopping=pb.Stopping(max_tokens=max_tokens))
        assert text_of(messages) == "hello world"[:max_tokens]
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert messages[-1].usage.completion_tokens == max_tokens


async def test_first_token_is_the_end_token(make_cluster: Any) -> None:
    async with make_cluster("") as cluster:
        await cluster.router.wait_ready()
        messages = await collect(cluster)
        assert (text_of(messages), messages[-1].finish_reason) == ("", pb.FINISH_REASON_STOP)
        assert messages[-1].usage.completion_tokens == 1


async def test_emoji_arrive_whole(make_cluster: Any) -> None:
    said = "né 👩‍👩‍👧 日本"
    async with make_cluster(said) as cluster:
        await cluster.router.wait_ready()
        messages = await collect(cluster)
        assert text_of(messages) == said
        assert not any("\ufffd" in message.text for message in messages)


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
async def test_stop_string_across_tokens(make_cluster: Any, batch: int, include: bool, expected: str) -> None:
    def setup(cluster: Any) -> None:
        for worker in cluster.workers:
            worker.batch = batch

    async with make_cluster("one END two and much more that nobody sees", setup=setup) as cluster:
        await cluster.router.wait_ready()
        messages = await collect(cluster, stopping=pb.Stopping(stop=["END", "zzz"], include_stop=include))
        assert text_of(messages) == expected
        assert messages[-1].stop_reason == "END"
        assert messages[-1].usage.completion_tokens == len("one END")
        if batch == 1:
            await cluster.idle()
            attempt = cluster.workers[1].submits[0].attempt_id
            await cluster.eventually(lambda: bool(cluster.workers[1].cancels))
            assert cluster.workers[1].cancels == [attempt]


async def test_n_choices(make_cluster: Any, byte_ids: Any, eos: int) -> None:
    def script(choice: int) -> list[int]:
        return [*byte_ids("abc"[choice] * (choice + 1)), eos]

    async with make_cluster(script) as cluster:
        await cluster.router.wait_ready()
        messages = await collect(cluster, sampling=pb.Sampling(n=3))
        assert [text_of(messages, index) for index in range(3)] == ["a", "bb", "ccc"]
        assert sum(message.finish_reason != 0 for message in messages) == 3
        assert [message.HasField("usage") for message in messages].count(True) == 1
        assert messages[-1].HasField("usage")
        assert messages[-1].usage.completion_tokens == 2 + 3 + 4


async def test_logprobs_one_per_token_and_prompt(make_cluster: Any) -> None:
    async with make_cluster("abc") as cluster:
        await cluster.router.wait_ready()
        options = pb.ResponseOptions(logprobs=1, prompt_logprobs=0)
        messages = await collect(cluster, response=options)
        logprobs = [item for message in messages for item in message.logprobs]
        assert [item.text for item in logprobs] == ["a", "b", "c", "<|im_end|>"]
        assert len(messages[0].prompt_logprobs) == len("a prompt") - 1


async def test_client_cancel_reaches_both_workers(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 2

    async with make_cluster("hello", setup=setup) as cluster:
        await cluster.router.wait_ready()
        call = cluster.stub.Generate(pb.GenerateRequest(text="x"))
        await call.read()
        await cluster.workers[1].paused.wait()
        call.cancel()
        await cluster.idle()
        await cluster.eventually(lambda: bool(all(worker.cancels for worker in cluster.workers)))
        attempt = cluster.workers[0].submits[0].attempt_id
        assert [worker.cancels for worker in cluster.workers] == [[attempt], [attempt]]


async def test_deadline(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 1

    async with make_cluster("hello", setup=setup, default_deadline_s=0.3) as cluster:
        await cluster.router.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < cluster.workers[1].submits[0].deadline_s <= 0.3
        await cluster.idle()


async def test_long_prompt_travels_in_pieces(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        for worker in cluster.workers:
            worker.max_model_len, worker.num_blocks = 40000, 4000

    async with make_cluster("ok", setup=setup) as cluster:
        await cluster.router.wait_ready()
        prompt = [token % 250 for token in range(20001)]
        messages = await collect(cluster, token_ids=pb.TokenIds(ids=prompt), text=None)
        assert text_of(messages) == "ok"
        for worker in cluster.workers:
            assert list(worker.submits[0].prompt_ids) == prompt


async def test_chat_template(make_cluster: Any, tokenizer: Any) -> None:
    async with make_cluster("ok") as cluster:
        await cluster.router.wait_ready()
        messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        await collect(cluster, text=None, messages=messages)
        prompt = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert list(cluster.workers[0].submits[0].prompt_ids) == tokenizer.encode(prompt).ids


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"sampling": pb.Sampling(temperature=-1)}, InvalidRequest, "sampling.temperature"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, InvalidRequest, "sampling.temperature"),
        ({"sampling": pb.Sampling(top_p=0)}, InvalidRequest, "sampling.top_p"),
        ({"sampling": pb.Sampling(n=0)}, InvalidRequest, "sampling.n"),
        ({"sampling": pb.Sampling(n=9)}, InvalidRequest, "sampling.n"),
        ({"sampling": pb.Sampling(logit_bias={300: 1.0})}, InvalidRequest, "sampling.logit_bias"),
        ({"stopping": pb.Stopping(max_tokens=0)}, InvalidRequest, "stopping.max_tokens"),
        ({"stopping": pb.Stopping(max_tokens=2, min_tokens=3)}, InvalidRequest, "stopping.min_tokens"),
        ({"stopping": pb.Stopping(stop=[""])}, InvalidRequest, "stopping.stop"),
        ({"response": pb.ResponseOptions(logprobs=21)}, InvalidRequest, "response.logprobs"),
        ({"structured_output": pb.StructuredOutput(json_schema="{")}, InvalidRequest, "structured_output.json_schema"),
        ({"structured_output": pb.StructuredOutput(json_schema="[" * 100_000)}, InvalidRequest, None),
        ({"request_id": "a\nb"}, InvalidRequest, "request_id"),
        ({"request_id": "é"}, InvalidRequest, "request_id"),
        ({"request_id": "x" * 257}, InvalidRequest, "request_id"),
        ({"text": "x" * 50_000}, InvalidRequest, "text"),
        ({"text": ""}, InvalidRequest, "text"),
        ({"text": "x" * 512}, InvalidRequest, "text"),
        ({"text": None, "token_ids": pb.TokenIds(ids=[300])}, InvalidRequest, "token_ids"),
        ({"text": None}, InvalidRequest, "prompt"),
        ({"text": None, "messages": pb.ChatMessages()}, InvalidRequest, "messages"),
        (
            {"text": None, "messages": pb.ChatMessages(messages=[pb.ChatMessage(role="x", content="y")])},
            InvalidRequest,
            "messages",
        ),
        ({"model": "other"}, ModelNotFound, None),
    ],
)
async def test_refusals_name_the_field(make_cluster: Any, fields: Any, kind: Any, field: str | None) -> None:
    async with make_cluster("ok") as cluster:
        await cluster.router.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster, **fields)
        error = error_from_rpc(caught.value)
        assert type(error) is kind
        if field is not None:
            assert isinstance(error, InvalidRequest)
            assert error.field == field
        assert not cluster.workers[0].submits
        assert cluster.router.admission.in_flight == 0


async def test_prompt_that_fills_the_context_says_the_numbers(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster:
        await cluster.router.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match=r"513 tokens.*512"):
            await collect(cluster, text="x" * 513)
        messages = await collect(cluster, text="x" * 511)
        assert messages[-1].usage.completion_tokens == 1


async def test_prompt_that_no_worker_can_ever_hold(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].num_blocks = 2

    async with make_cluster("ok", setup=setup) as cluster:
        await cluster.router.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster, text="x" * 33)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_admission(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 1

    async with make_cluster("ok", setup=setup, max_queued=1) as cluster:
        await cluster.router.wait_ready()
        first = cluster.stub.Generate(pb.GenerateRequest(text="x"))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster)
        error = error_from_rpc(caught.value)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        cluster.workers[1].go.set()
        while await first.read() is not grpc.aio.EOF:
            pass
        assert text_of(await collect(cluster)) == "ok"


async def test_no_worker(make_cluster: Any) -> None:
    async with make_cluster("ok", prefills=0, decodes=0) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster)
        assert isinstance(error_from_rpc(caught.value), Unavailable)


def test_router_never_imports_torch() -> None:
    code = (
        "import sys, twinpool.router.main; "
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(('twinpool.engine', 'twinpool.kv_transfer'))]; "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("route", "prefill"), [("remote", "prefill-0"), ("local", "")])
async def test_a_request_may_name_its_route_where_that_is_allowed(make_cluster: Any, route: str, prefill: str) -> None:
    configured = "never" if route == "remote" else "always"
    async with make_cluster("hello", disaggregate=configured, route_hints=True) as cluster:
        await cluster.router.wait_ready()
        await cluster.until(lambda: any(session.report.links for session in cluster.router.registry.sessions))
        messages = [
            message
            async for message in cluster.stub.Generate(
                pb.GenerateRequest(text="x"), metadata=(("x-twinpool-route", route),)
            )
        ]
        assert messages[-1].prefill_worker == prefill


@pytest.mark.parametrize(("allowed", "route", "says"), [(False, "local", "route_hints"), (True, "here", "local or")])
async def test_a_route_that_is_not_taken_is_refused(make_cluster: Any, allowed: bool, route: str, says: str) -> None:
    async with make_cluster("hello", route_hints=allowed) as cluster:
        await cluster.router.wait_ready()
        with pytest.raises(grpc.RpcError) as raised:
            await cluster.stub.Generate(pb.GenerateRequest(text="x"), metadata=(("x-twinpool-route", route),)).read()
        error = error_from_rpc(raised.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == "route"
        assert says in error.message
