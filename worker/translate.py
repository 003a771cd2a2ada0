"""Proto messages of worker.v1 to engine dataclasses and back; nothing below this file sees proto types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from twinpool.engine.core import EngineLoad
from twinpool.engine.ports import RequestFailure, RequestOutput
from twinpool.engine.request import (
    Constraint,
    FailureCode,
    FinishReason,
    Request,
    SamplingParams,
    StopParams,
    TokenLogprob,
)
from twinpool.proto import inference_pb2, worker_pb2

FINISH_TO_PROTO = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}
FAILURE_TO_PROTO = {
    FailureCode.INVALID: worker_pb2.FAILURE_CODE_INVALID,
    FailureCode.EXHAUSTED: worker_pb2.FAILURE_CODE_EXHAUSTED,
    FailureCode.KV_LOST: worker_pb2.FAILURE_CODE_KV_LOST,
    FailureCode.DRAINING: worker_pb2.FAILURE_CODE_DRAINING,
    FailureCode.DEADLINE: worker_pb2.FAILURE_CODE_DEADLINE,
    FailureCode.INTERNAL: worker_pb2.FAILURE_CODE_INTERNAL,
}


MAX_DEADLINE_S = 30 * 86_400.0
"""Longer waits overflow what the system can wait for."""


def request_from_submit(submit: worker_pb2.Submit, prompt: Sequence[int], origin: int, now: float) -> Request:
    """The engine's request for a Submit; ``prompt`` is the whole prompt, ``now`` the engine clock (seconds)."""
    sampling, stopping = submit.sampling, submit.stopping
    return Request(
        attempt_id=submit.attempt_id,
        prompt_ids=prompt,
        sampling=SamplingParams(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            n=sampling.n if sampling.HasField("n") else 1,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            logit_bias=dict(sampling.logit_bias),
            logprobs=submit.logprobs if submit.HasField("logprobs") else None,
            prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
        ),
        stop=StopParams(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
        ),
        choice=submit.first_choice,
        output_ids=list(submit.output_ids),
        num_prior_outputs=len(submit.output_ids),
        constraint=_constraint(submit.structured_output),
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        transfer_id=submit.transfer_id,
        deadline=now + min(submit.deadline_s, MAX_DEADLINE_S) if submit.deadline_s > 0 else None,
        arrival=now,
        origin=origin,
    )


def _constraint(structured: inference_pb2.StructuredOutput) -> Constraint | None:
    match structured.WhichOneof("constraint"):
        case "json_schema":
            return Constraint("json_schema", structured.json_schema)
        case "regex":
            return Constraint("regex", structured.regex)
        case "grammar":
            return Constraint("grammar", structured.grammar)
        case "choice":
            return Constraint("choice", json.dumps(list(structured.choice.values)))
        case _:
            return None


def logprob_to_proto(logprob: TokenLogprob) -> inference_pb2.TokenLogprob:
    """One token's log probability."""
    return inference_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top=[inference_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top],
    )


def logprobs_to_proto(logprobs: Iterable[TokenLogprob]) -> list[inference_pb2.TokenLogprob]:
    """Log probabilities in order."""
    return [logprob_to_proto(logprob) for logprob in logprobs]


def add_output(message: worker_pb2.AttemptOutput, output: RequestOutput) -> None:
    """Appends one choice's new tokens, without prompt log probabilities (they travel in pieces)."""
    message.token_ids.extend(output.token_ids)
    if output.logprobs:
        message.logprobs.extend(logprobs_to_proto(output.logprobs))
    if output.finish is not None:
        message.finish_reason = FINISH_TO_PROTO[output.finish]
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    if output.stats is not None:
        stats = output.stats
        message.stats.CopyFrom(
            worker_pb2.AttemptStats(
                cached_tokens=stats.cached_tokens,
                computed_tokens=stats.computed_tokens,
                remote_tokens=stats.remote_tokens,
                queue_s=output.queue_s,
                prefill_s=output.prefill_s,
                transfer_s=stats.transfer_s,
                exposed_transfer_s=stats.exposed_transfer_s,
                transfer_bytes=stats.transfer_bytes,
                transport=stats.transport,
                draft_tokens=stats.draft_tokens,
                accepted_tokens=stats.accepted_tokens,
                preemptions=stats.preemptions,
                read_s=stats.read_s,
                sample_s=stats.sample_s,
                confirm_s=stats.confirm_s,
                schedule_s=stats.schedule_s,
            )
        )


def failure_to_proto(failure: RequestFailure) -> worker_pb2.Failed:
    """An attempt's failure."""
    return worker_pb2.Failed(
        attempt_id=failure.attempt_id,
        code=FAILURE_TO_PROTO[failure.code],
        message=failure.message,
        field=failure.field,
    )


def load_to_report(load: EngineLoad, open_exchanges: int, quarantined: int, draining: bool) -> worker_pb2.Report:
    """The periodic report, without links."""
    return worker_pb2.Report(
        steps=load.steps,
        running=load.running,
        waiting=load.waiting,
        loading=load.loading,
        held=load.held,
        free_blocks=load.free_blocks,
        queued_tokens=load.queued_tokens,
        open_exchanges=open_exchanges,
        quarantined_blocks=quarantined,
        draining=draining,
        totals=worker_pb2.Totals(
            preemptions=load.preemptions,
            batches=load.batches,
            batch_requests=load.batch_requests,
            batch_tokens=load.batch_tokens,
            batch_s=load.batch_s,
        ),
    )
