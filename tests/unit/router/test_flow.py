"""What a flow does when the other side misbehaves."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from twinpool.proto import inference_pb2 as pb
from twinpool.proto import worker_pb2
from twinpool.router import flow as flow_module
from twinpool.router.choice import Choice
from twinpool.router.messages import FinishReason, Output, Sampling, Stopping
from twinpool.router.request import ResolvedRequest
from twinpool.router.text import ModelText


def choice_of(tokenizer: Any, **stopping: Any) -> Choice:
    sampling = Sampling(0.0, 1.0, 0, 0.0, 1, 0.0, 0.0, 1.0, {})
    request = ResolvedRequest("r", "m", (1, 2), sampling, 1, Stopping(**{"max_tokens": 100} | stopping))
    return Choice(0, request, ModelText(tokenizer, eos_ids=frozenset({258})))


def output(index: int, tokens: list[int], finish: FinishReason | None = None) -> Output:
    return Output(1, 0, index, tokens, finish=finish)


def test_first_copy_wins_and_order_is_kept(tokenizer: Any, byte_ids: Any) -> None:
    a, b, c, d = byte_ids("abcd")
    choice = choice_of(tokenizer)
    assert choice.accept(output(2, [c])) == 0
    assert choice.accept(output(0, [a])) == 1
    assert choice.accept(output(0, [d])) == 0
    assert choice.accept(output(0, [a, b])) == 2
    assert choice.accept(output(1, [b, c, d], FinishReason.LENGTH)) == 1
    assert choice.token_ids == [a, b, c, d]
    assert choice.accept(output(4, [a])) == 0
    assert "".join(choice.take().text) == "abcd"
    assert choice.finish is FinishReason.LENGTH


def test_late_finish_waits_for_its_tokens(tokenizer: Any, byte_ids: Any) -> None:
    a, b = byte_ids("ab")
    choice = choice_of(tokenizer)
    choice.accept(output(1, [b], FinishReason.LENGTH))
    assert choice.finish is None
    choice.accept(output(0, [a]))
    assert choice.finish is FinishReason.LENGTH


def test_tokens_alone_can_complete_a_choice(tokenizer: Any, byte_ids: Any, eos: int) -> None:
    choice = choice_of(tokenizer, max_tokens=2)
    choice.accept(output(0, byte_ids("a")))
    assert not choice.finish_if_complete()
    choice.accept(output(1, byte_ids("b")))
    assert choice.finish_if_complete()
    assert choice.finish is FinishReason.LENGTH
    ended = choice_of(tokenizer)
    ended.accept(output(0, [eos]))
    assert ended.finish_if_complete()
    assert ended.stop_reason is None
    ignoring = choice_of(tokenizer, ignore_eos=True)
    ignoring.accept(output(0, [eos]))
    assert not ignoring.finish_if_complete()


def test_min_tokens_holds_stop_strings_off(tokenizer: Any, byte_ids: Any) -> None:
    choice = choice_of(tokenizer, stop=("ab",), min_tokens=3)
    choice.accept(output(0, byte_ids("abxab")))
    assert "".join(choice.take().text) == "abx"
    assert choice.finish is FinishReason.STOP


def test_a_slow_client_gets_larger_pieces(tokenizer: Any, byte_ids: Any) -> None:
    choice = choice_of(tokenizer)
    for index, token in enumerate(byte_ids("hello")):
        choice.accept(output(index, [token]))
    assert choice.take().text == list("hello")
    assert not choice.has_news


async def test_a_client_that_does_not_read_is_cancelled(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "STALL_S", 0.2)

    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 3

    async with make_cluster("hello", setup=setup) as cluster:
        await cluster.router.wait_ready()
        intake = cluster.router.intake
        flow = await intake.open(pb.GenerateRequest(text="x"))
        chunks = flow.chunks()
        assert (await anext(chunks)).text.startswith("h")
        await cluster.idle()
        await cluster.eventually(lambda: bool(cluster.workers[1].cancels))
        with pytest.raises(flow_module.Cancelled, match="read nothing"):
            async for _ in chunks:
                pass


async def test_output_of_an_unknown_attempt_is_answered_with_cancel(make_cluster: Any) -> None:
    async with make_cluster("hello") as cluster:
        await cluster.router.wait_ready()
        decode = cluster.workers[1]
        step = worker_pb2.StepOutput(outputs=[worker_pb2.AttemptOutput(attempt_id=77, token_ids=[1])])
        decode.outbox.put(worker_pb2.SessionResponse(step=step))
        decode.outbox.put(worker_pb2.SessionResponse(step=step))
        await cluster.eventually(lambda: bool(decode.cancels))
        assert decode.cancels == [77]


async def test_many_at_once_with_random_cancels(make_cluster: Any) -> None:
    async with make_cluster("hello world", decodes=2) as cluster:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 3)

        async def one(number: int) -> str | None:
            call = cluster.stub.Generate(pb.GenerateRequest(text=f"prompt {number}"))
            text = ""
            while (message := await call.read()) is not grpc.aio.EOF:
                text += message.text
                if number % 3 == 0 and len(text) >= number % 7:
                    call.cancel()
                    return None
            return text

        async with asyncio.timeout(20):
            answers = await asyncio.gather(*[one(number) for number in range(40)])
        assert set(answers) == {None, "hello world"}
        await cluster.idle()
        assert not any(session._sinks for session in cluster.router.registry.sessions)
