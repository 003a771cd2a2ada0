"""Translates between worker.v1 messages and the router's own values; nothing else touches worker.v1 types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from twinpool.proto import inference_pb2, worker_pb2
from twinpool.router.messages import (
    Constraint,
    Failure,
    FailureCode,
    FinishReason,
    LinkReport,
    Output,
    Peer,
    Report,
    Stats,
    Submission,
    TokenLogprob,
    Totals,
    WorkerInfo,
)

PIECE_TOKENS = 8192
"""Most prompt tokens per message: at up to five bytes each, a message stays under 64 KiB."""

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_FAILURES = {
    worker_pb2.FAILURE_CODE_INVALID: FailureCode.INVALID,
    worker_pb2.FAILURE_CODE_EXHAUSTED: FailureCode.EXHAUSTED,
    worker_pb2.FAILURE_CODE_KV_LOST: FailureCode.KV_LOST,
    worker_pb2.FAILURE_CODE_DRAINING: FailureCode.DRAINING,
    worker_pb2.FAILURE_CODE_DEADLINE: FailureCode.DEADLINE,
}


def worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """The self-description in a ``Welcome``."""
    return WorkerInfo(
        worker_id=message.worker_id,
        epoch=message.epoch,
        protocol=message.protocol,
        role=message.role,
        model=message.model,
        revision=message.revision,
        layout=message.layout,
        layout_text=message.layout_text,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        kv_address=message.kv_address,
        connector=message.connector,
        vocab_size=message.vocab_size,
    )


def report(message: worker_pb2.Report) -> Report:
    """A load report."""
    links = tuple(
        LinkReport(
            worker_id=link.worker_id,
            epoch=link.epoch,
            linked=link.linked,
            transport=link.transport,
            gigabytes_per_second=link.gigabytes_per_second,
            error=link.error,
        )
        for link in message.links
    )
    return Report(
        steps=message.steps,
        running=message.running,
        waiting=message.waiting,
        loading=message.loading,
        held=message.held,
        free_blocks=message.free_blocks,
        queued_tokens=message.queued_tokens,
        open_exchanges=message.open_exchanges,
        quarantined_blocks=message.quarantined_blocks,
        draining=message.draining,
        links=links,
        totals=Totals(
            transfers=message.totals.transfers,
            transfers_lost=message.totals.transfers_lost,
            transfer_bytes=message.totals.transfer_bytes,
            transfer_s=message.totals.transfer_s,
            exposed_transfer_s=message.totals.exposed_transfer_s,
            holds_released=message.totals.holds_released,
            holds_revoked=message.totals.holds_revoked,
            preemptions=message.totals.preemptions,
            batches=message.totals.batches,
            batch_requests=message.totals.batch_requests,
            batch_tokens=message.totals.batch_tokens,
            batch_s=message.totals.batch_s,
        ),
    )


def outputs(message: worker_pb2.StepOutput) -> Iterator[Output]:
    """The outputs of one step."""
    for output in message.outputs:
        yield Output(
            attempt_id=output.attempt_id,
            choice=output.choice,
            index=output.index,
            token_ids=output.token_ids,
            logprobs=_logprobs(output.logprobs),
            finish=_FINISH.get(output.finish_reason),
            stop_token_id=output.stop_token_id if output.HasField("stop_token_id") else None,
            prompt_logprobs=_logprobs(output.prompt_logprobs),
            stats=_stats(output.stats) if output.HasField("stats") else None,
        )


def failure(message: worker_pb2.Failed) -> Failure:
    """A failed attempt; a code that this version does not know counts as internal."""
    code = _FAILURES.get(message.code, FailureCode.INTERNAL)
    return Failure(message.attempt_id, code, message.message, message.field)


def submit_messages(submission: Submission) -> Iterator[worker_pb2.SessionRequest]:
    """The messages that start an attempt: pieces of a long prompt, then ``Submit``."""
    prompt = submission.prompt_ids
    last = max(len(prompt) - 1, 0) // PIECE_TOKENS * PIECE_TOKENS
    for start in range(0, last, PIECE_TOKENS):
        piece = worker_pb2.TokenPiece(attempt_id=submission.attempt_id, prompt_ids=prompt[start : start + PIECE_TOKENS])
        yield worker_pb2.SessionRequest(piece=piece)
    yield worker_pb2.SessionRequest(submit=_submit(submission, prompt[last:]))


def cancel(attempt_id: int) -> worker_pb2.SessionRequest:
    """Ends an attempt."""
    return worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(attempt_id=attempt_id))


def hello(router_id: str, epoch: int, protocol: int) -> worker_pb2.SessionRequest:
    """Opens a session."""
    return worker_pb2.SessionRequest(hello=worker_pb2.Hello(router_id=router_id, epoch=epoch, protocol=protocol))


def heartbeat() -> worker_pb2.SessionRequest:
    """Sign of life."""
    return worker_pb2.SessionRequest(heartbeat=worker_pb2.Heartbeat())


def peers(items: Iterable[Peer]) -> worker_pb2.SessionRequest:
    """The complete set of prefill workers to be linked to."""
    message = worker_pb2.Peers(
        peers=[
            worker_pb2.Peer(worker_id=peer.worker_id, epoch=peer.epoch, kv_address=peer.kv_address) for peer in items
        ]
    )
    return worker_pb2.SessionRequest(peers=message)


def _submit(submission: Submission, prompt_ids: Sequence[int]) -> worker_pb2.Submit:
    sampling, stopping = submission.sampling, submission.stopping
    message = worker_pb2.Submit(
        attempt_id=submission.attempt_id,
        request_id=submission.request_id,
        prompt_ids=prompt_ids,
        output_ids=submission.output_ids,
        sampling=inference_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            n=submission.n,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=stopping.ignore_eos,
        ),
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        deadline_s=submission.deadline_s,
        transfer_id=submission.transfer_id,
        prefill_worker=submission.prefill_worker,
        prefill_epoch=submission.prefill_epoch,
        first_choice=submission.first_choice,
    )
    if submission.logprobs is not None:
        message.logprobs = submission.logprobs
    if submission.prompt_logprobs is not None:
        message.prompt_logprobs = submission.prompt_logprobs
    if submission.constraint is not None:
        message.structured_output.CopyFrom(_structured_output(submission.constraint))
    return message


def _structured_output(constraint: Constraint) -> inference_pb2.StructuredOutput:
    match constraint.kind, constraint.source:
        case "json_schema", str(source):
            return inference_pb2.StructuredOutput(json_schema=source)
        case "regex", str(source):
            return inference_pb2.StructuredOutput(regex=source)
        case "grammar", str(source):
            return inference_pb2.StructuredOutput(grammar=source)
        case _:
            return inference_pb2.StructuredOutput(choice=inference_pb2.Choices(values=constraint.source))


def _logprobs(messages: Sequence[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(item.token_id, item.logprob, item.rank, tuple((top.token_id, top.logprob) for top in item.top))
        for item in messages
    )


def _stats(message: worker_pb2.AttemptStats) -> Stats:
    return Stats(
        cached_tokens=message.cached_tokens,
        computed_tokens=message.computed_tokens,
        remote_tokens=message.remote_tokens,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        transfer_s=message.transfer_s,
        exposed_transfer_s=message.exposed_transfer_s,
        transfer_bytes=message.transfer_bytes,
        transport=message.transport,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        preemptions=message.preemptions,
        read_s=message.read_s,
        sample_s=message.sample_s,
        confirm_s=message.confirm_s,
        schedule_s=message.schedule_s,
    )
