"""From engine steps to sessions: one hop to asyncio per step, one message per session and step.

``OutputFan.emit`` runs on the engine thread and hands the step's outputs over; everything else runs on the event
loop. A session that is gone simply has no mailbox any more: its outputs are dropped, its attempts were cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twinpool.engine.ports import RequestOutput, StepOutputs
from twinpool.engine.request import FailureCode
from twinpool.proto import worker_pb2
from twinpool.rpc import Outbox
from twinpool.worker.cache_feed import CacheFeed
from twinpool.worker.translate import FAILURE_TO_PROTO, add_output, failure_to_proto, logprobs_to_proto

PROMPT_LOGPROBS_PER_MESSAGE = 128
STEP_BYTES = 48 << 10
"""Outputs that would make a step's message larger go into another one: messages stay under 64 KiB."""

SessionOutbox = Outbox[worker_pb2.SessionResponse]


class Mailbox:
    """What one session receives; merges unsent step outputs, so that a slow reader costs memory per token only."""

    def __init__(self, outbox: SessionOutbox) -> None:
        self.outbox = outbox
        self.unfinished: dict[int, int] = {}
        """Attempts that have not ended here, with the number of choices still open."""

    def add_outputs(self, step: int, outputs: list[RequestOutput], final_on_first: bool) -> None:
        """Queues one step's outputs. ``final_on_first``: a token without finish also ends the choice (prefill)."""
        last = self.outbox.last_data
        size = 0 if last is None else last.ByteSize()
        if last is None or last.WhichOneof("message") != "step" or size > STEP_BYTES:
            last, size = self._new_step(), 0
        last.step.step = step
        known = {(output.attempt_id, output.choice): output for output in last.step.outputs}
        for output in outputs:
            size += 128 + 5 * len(output.token_ids) + sum(32 + 16 * len(item.top) for item in output.logprobs)
            if size > STEP_BYTES:
                last, size, known = self._new_step(), 0, {}
                last.step.step = step
            message = known.get((output.attempt_id, output.choice)) if known else None
            if message is None or message.index + len(message.token_ids) != output.index:
                message = last.step.outputs.add(attempt_id=output.attempt_id, choice=output.choice, index=output.index)
            add_output(message, output)
            if output.prompt_logprobs:
                self._add_prompt_logprobs(step, output)
            if output.finish is not None or (final_on_first and output.token_ids):
                self.end_choice(output.attempt_id)

    def _new_step(self) -> worker_pb2.SessionResponse:
        message = worker_pb2.SessionResponse(step=worker_pb2.StepOutput())
        self.outbox.put(message)
        return message

    def _add_prompt_logprobs(self, step: int, output: RequestOutput) -> None:
        for start in range(0, len(output.prompt_logprobs), PROMPT_LOGPROBS_PER_MESSAGE):
            piece = worker_pb2.AttemptOutput(
                attempt_id=output.attempt_id,
                choice=output.choice,
                index=output.index,
                prompt_logprobs=logprobs_to_proto(output.prompt_logprobs[start : start + PROMPT_LOGPROBS_PER_MESSAGE]),
            )
            self.outbox.put_control(worker_pb2.SessionResponse(step=worker_pb2.StepOutput(step=step, outputs=[piece])))

    def fail(self, attempt_id: int, code: FailureCode, message: str) -> None:
        """The attempt failed."""
        self.unfinished.pop(attempt_id, None)
        failed = worker_pb2.Failed(attempt_id=attempt_id, code=FAILURE_TO_PROTO[code], message=message)
        self.outbox.put(worker_pb2.SessionResponse(failed=failed))

    def end_choice(self, attempt_id: int) -> None:
        """One choice of the attempt ended."""
        left = self.unfinished.get(attempt_id, 0) - 1
        if left > 0:
            self.unfinished[attempt_id] = left
        else:
            self.unfinished.pop(attempt_id, None)


class OutputFan:
    """The engine's output sink: fans step outputs out to the sessions they belong to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, final_on_first: bool) -> None:
        self._loop = loop
        self._final_on_first = final_on_first
        self._mailboxes: dict[int, Mailbox] = {}
        self._cache = CacheFeed(loop)

    def open(self, origin: int, outbox: SessionOutbox) -> Mailbox:
        """Starts delivery to a session."""
        mailbox = self._mailboxes[origin] = Mailbox(outbox)
        self._cache.open(origin, outbox)
        return mailbox

    def close(self, origin: int) -> None:
        """Ends delivery to a session."""
        del self._mailboxes[origin]
        self._cache.close(origin)

    @property
    def unfinished(self) -> int:
        """Attempts that have not ended, all sessions."""
        return sum(len(mailbox.unfinished) for mailbox in self._mailboxes.values())

    def hand_over(self, cancel: Callable[[int], None], reason: str) -> None:
        """Fails all unfinished attempts with DRAINING and cancels them."""
        for mailbox in self._mailboxes.values():
            for attempt_id in list(mailbox.unfinished):
                mailbox.fail(attempt_id, FailureCode.DRAINING, reason)
                cancel(attempt_id)

    def emit(self, outputs: StepOutputs) -> None:
        """Hands a step's outputs to the event loop; called on the engine thread."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: StepOutputs) -> None:
        by_origin: dict[int, list[RequestOutput]] = {}
        for output in outputs.outputs:
            by_origin.setdefault(output.origin, []).append(output)
        for origin, attempt_id in outputs.loaded:
            if mailbox := self._mailboxes.get(origin):
                mailbox.outbox.put(worker_pb2.SessionResponse(loaded=worker_pb2.Loaded(attempt_id=attempt_id)))
        for origin, group in by_origin.items():
            if mailbox := self._mailboxes.get(origin):
                mailbox.add_outputs(outputs.step, group, self._final_on_first)
        for origin, attempt_id in outputs.ended:
            if mailbox := self._mailboxes.get(origin):
                mailbox.unfinished.pop(attempt_id, None)
        for failure in outputs.failures:
            if mailbox := self._mailboxes.get(failure.origin):
                mailbox.unfinished.pop(failure.attempt_id, None)
                mailbox.outbox.put(worker_pb2.SessionResponse(failed=failure_to_proto(failure)))
        if outputs.cache_reset or outputs.stored_hashes or outputs.removed_hashes:
            self._cache.apply(outputs.cache_reset, outputs.stored_hashes, outputs.removed_hashes)
