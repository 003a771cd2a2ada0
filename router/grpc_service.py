"""The public gRPC services: translate, call, translate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from importlib import metadata

import grpc.aio

from twinpool.errors import Cancelled, NotFound
from twinpool.proto import inference_pb2, inference_pb2_grpc
from twinpool.router.admission import Admission
from twinpool.router.api_keys import ApiKeys
from twinpool.router.chunk import Chunk
from twinpool.router.intake import Intake
from twinpool.router.messages import FinishReason, TokenLogprob
from twinpool.router.openai_format import inner_id
from twinpool.router.registry import Registry
from twinpool.router.summary import Summary
from twinpool.router.text import ModelText
from twinpool.router.trace import Trace, TraceBook, suspect
from twinpool.router.worker_session import WorkerSession
from twinpool.rpc import authorization

INFERENCE = "twinpool.inference.v1.InferenceService"
INFO = "twinpool.inference.v1.InfoService"
REQUEST_ID_METADATA = "x-request-id"
ROUTE_METADATA = "x-twinpool-route"
TRACE_METADATA = "traceparent"

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation."""

    def __init__(self, intake: Intake, text: ModelText, keys: ApiKeys) -> None:
        self._intake = intake
        self._keys = keys
        self._text = text

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        metadata = context.invocation_metadata()
        caller = self._keys.caller(authorization(metadata))
        named = dict(metadata or ())
        route, trace = named.get(ROUTE_METADATA), str(named.get(TRACE_METADATA, ""))
        flow = await self._intake.open(request, caller, context.time_remaining(), route, trace)
        # The generators below are not closed at once when a call ends while a response is being written.
        context.add_done_callback(lambda _: flow.cancel(Cancelled("the client cancelled")))
        await context.send_initial_metadata(((REQUEST_ID_METADATA, flow.request.request_id),))
        async with aclosing(flow.chunks()) as chunks:
            async for chunk in chunks:
                yield response(chunk, self._text)


class InfoServicer(inference_pb2_grpc.InfoServiceServicer):
    """Read-only facts."""

    def __init__(self, registry: Registry, admission: Admission, book: TraceBook) -> None:
        self._registry = registry
        self._admission = admission
        self._book = book

    async def GetTrace(
        self, request: inference_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetTraceResponse:
        """See inference.proto."""
        trace = self._book.get(request.request_id) or self._book.get(inner_id(request.request_id))
        if trace is None:
            raise NotFound(
                f"request {request.request_id!r} is not among the last ones that this router served; "
                "router.kept_traces says how many it keeps"
            )
        return _trace(trace, self._book)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        return inference_pb2.ListModelsResponse(models=served_models(self._registry))

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetStatusResponse:
        """See inference.proto."""
        reason = "the router is shutting down" if self._admission.draining else self._registry.not_ready_reason
        return inference_pb2.GetStatusResponse(
            version=metadata.version("twinpool"),
            workers=[_worker_status(session, self._registry) for session in self._registry.sessions],
            in_flight=self._admission.in_flight,
            ready=not reason,
            not_ready_reason=reason,
        )


def served_models(registry: Registry) -> list[inference_pb2.Model]:
    """The served model, once a worker is connected; one entry per revision during an upgrade."""
    lengths: dict[str, int] = {}
    for view in registry.views():
        revision = view.info.revision
        lengths[revision] = min(view.info.max_model_len, lengths.get(revision, view.info.max_model_len))
    name = registry.model or ""
    return [
        inference_pb2.Model(id=name, max_model_len=length, revision=revision) for revision, length in lengths.items()
    ]


def response(chunk: Chunk, text: ModelText) -> inference_pb2.GenerateResponse:
    """A chunk as a message."""
    message = inference_pb2.GenerateResponse(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs(chunk.logprobs, text),
        prompt_logprobs=_logprobs(chunk.prompt_logprobs, text),
        finish_reason=_FINISH[chunk.finish],
        stop_reason="" if chunk.stop_reason is None else str(chunk.stop_reason),
        prompt_token_ids=chunk.prompt_token_ids,
    )
    if chunk.summary is not None:
        _add_summary(message, chunk.summary)
    return message


def _add_summary(message: inference_pb2.GenerateResponse, summary: Summary) -> None:
    usage, timings = summary.usage, summary.timings
    message.usage.CopyFrom(
        inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            remote_tokens=usage.remote_tokens,
            decode_cached_tokens=usage.decode_cached_tokens,
            decode_computed_tokens=usage.decode_computed_tokens,
            prefill_cached_tokens=usage.prefill_cached_tokens,
            prefill_computed_tokens=usage.prefill_computed_tokens,
            transfer_bytes=usage.transfer_bytes,
            transport=usage.transport,
            route_reason=usage.route_reason,
            redispatches=usage.redispatches,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
            preemptions=usage.preemptions,
        )
    )
    message.timings.CopyFrom(
        inference_pb2.Timings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            transfer_s=timings.transfer_s,
            exposed_transfer_s=timings.exposed_transfer_s,
            decode_s=timings.decode_s,
            first_token_s=timings.first_token_s,
            total_s=timings.total_s,
            read_s=timings.read_s,
            sample_s=timings.sample_s,
            confirm_s=timings.confirm_s,
            schedule_s=timings.schedule_s,
            admission_s=timings.admission_s,
        )
    )
    message.prefill_worker = summary.prefill_worker
    message.decode_worker = summary.decode_worker


def _logprobs(items: Iterable[TokenLogprob], text: ModelText) -> list[inference_pb2.TokenLogprob]:
    return [
        inference_pb2.TokenLogprob(
            token_id=item.token_id,
            logprob=item.logprob,
            rank=item.rank,
            top=[inference_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in item.top],
            text=text.token_text(item.token_id),
        )
        for item in items
    ]


def _trace(trace: Trace, book: TraceBook) -> inference_pb2.GetTraceResponse:
    stages = book.usual(trace)
    guilty = suspect(stages)
    message = inference_pb2.GetTraceResponse(
        request_id=trace.request_id,
        began_unix_s=trace.began,
        total_s=trace.total_s,
        first_token_s=trace.first_token_s,
        outcome=trace.outcome,
        suspect="" if guilty is None else guilty.span.stage.value,
    )
    for usual in stages:
        span = usual.span
        stage = inference_pb2.TraceStage(
            name=span.stage.value,
            worker=span.worker,
            start_s=span.start_s,
            duration_s=span.duration_s,
            delay_s=span.delay_s,
        )
        if usual.usual_s is not None:
            stage.usual_s = usual.usual_s
        message.stages.append(stage)
    if trace.summary is not None:
        message.redispatches = trace.summary.usage.redispatches
        message.route_reason = trace.summary.usage.route_reason
    return message


def _worker_status(session: WorkerSession, registry: Registry) -> inference_pb2.WorkerStatus:
    info, report = session.info, session.report
    status = inference_pb2.WorkerStatus(state=session.state, address=session.address, error=session.error)
    if info is None:
        return status
    status.worker_id, status.role, status.model = info.worker_id, info.role, info.model
    status.total_blocks = info.num_blocks
    if not session.usable:
        return status
    status.running, status.waiting = report.running, report.waiting
    status.loading, status.held = report.loading, report.held
    status.free_blocks, status.steps = report.free_blocks, report.steps
    status.open_exchanges, status.quarantined_blocks = report.open_exchanges, report.quarantined_blocks
    status.draining = report.draining
    status.links.extend(
        inference_pb2.Link(
            prefill_worker=link.worker_id,
            linked=link.linked,
            transport=link.transport,
            gigabytes_per_second=link.gigabytes_per_second,
            error=link.error,
        )
        for link in registry.links_of(session)
    )
    return status
