"""What a worker's mailbox puts into one message, and which attempts it counts as unfinished."""

from __future__ import annotations

import asyncio

from twinpool.engine.ports import RequestOutput, StepOutputs
from twinpool.engine.request import TokenLogprob
from twinpool.proto import worker_pb2
from twinpool.rpc import Outbox
from twinpool.worker.outputs import OutputFan

LIMIT = 64 << 10


async def drained(outbox: Outbox[worker_pb2.SessionResponse]) -> list[worker_pb2.SessionResponse]:
    outbox.close()
    return [message async for message in outbox]


def output(attempt_id: int, index: int, top: int = 0) -> RequestOutput:
    logprobs = [TokenLogprob(7, -1.0, 1, tuple((token, -1.5) for token in range(top)))] if top else []
    return RequestOutput(1, attempt_id, 0, index, [7], logprobs)


async def test_unsent_outputs_merge_and_messages_stay_small() -> None:
    fan = OutputFan(asyncio.get_running_loop(), final_on_first=False)
    outbox: Outbox[worker_pb2.SessionResponse] = Outbox()
    fan.open(1, outbox)
    for step in range(1, 40):
        fan.emit(StepOutputs(step, [output(attempt, step - 1, top=20) for attempt in range(1, 101)]))
    await asyncio.sleep(0)
    messages = await drained(outbox)
    assert 10 < len(messages) < 2 * 39
    assert max(message.ByteSize() for message in messages) < LIMIT
    indices: dict[int, list[int]] = {}
    for message in messages:
        for item in message.step.outputs:
            assert len(item.token_ids) == len(item.logprobs)
            indices.setdefault(item.attempt_id, []).extend(range(item.index, item.index + len(item.token_ids)))
    assert indices == {attempt: list(range(39)) for attempt in range(1, 101)}


async def test_an_attempt_that_ended_on_prefill_is_finished_here_too() -> None:
    fan = OutputFan(asyncio.get_running_loop(), final_on_first=False)
    mailbox = fan.open(1, Outbox())
    mailbox.unfinished[5] = 2
    fan.emit(StepOutputs(1, ended=[(1, 5)]))
    await asyncio.sleep(0)
    assert fan.unfinished == 0
