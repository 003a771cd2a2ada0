"""Where the time of a request went, as the client library gives it."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.proto import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TraceStage:
    """A stage; seconds. ``delay_s`` is what it added to the whole, ``usual_s`` what it usually adds (None: unknown)."""

    name: str
    worker: str
    start_s: float
    duration_s: float
    delay_s: float
    usual_s: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A request that has ended; ``suspect`` names the stage that took longest beyond what it usually takes."""

    request_id: str
    began_unix_s: float
    total_s: float
    first_token_s: float
    outcome: str
    suspect: str
    redispatches: int
    route_reason: str
    stages: tuple[TraceStage, ...]


def trace_from_proto(response: pb.GetTraceResponse) -> Trace:
    """Translates."""
    stages = tuple(
        TraceStage(
            name=stage.name,
            worker=stage.worker,
            start_s=stage.start_s,
            duration_s=stage.duration_s,
            delay_s=stage.delay_s,
            usual_s=stage.usual_s if stage.HasField("usual_s") else None,
        )
        for stage in response.stages
    )
    return Trace(
        request_id=response.request_id,
        began_unix_s=response.began_unix_s,
        total_s=response.total_s,
        first_token_s=response.first_token_s,
        outcome=response.outcome,
        suspect=response.suspect,
        redispatches=response.redispatches,
        route_reason=response.route_reason,
        stages=stages,
    )
