"""Where the time of each recent request went, stage by stage, and which stage took longer than it usually does.

Workers report durations, because clocks differ; the stages are laid out on the router's clock from them. ``TraceBook``
keeps the last requests and, per stage, what it usually takes (a median over recent requests, per token where the stage
works on tokens). The stage with the largest excess over that is the suspect.
"""

from __future__ import annotations

import enum
import logging
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from twinpool.router.summary import Summary

log = logging.getLogger(__name__)

_SAMPLES = 256
_LEAST_SAMPLES = 4
"""Before as many requests nothing is usual, and the longest stage is the suspect."""
QUIET = ("cancelled", "invalid_request")
"""Ends that are the client's own doing."""


class Stage(enum.Enum):
    """In the order in which a request passes through."""

    ROUTER_QUEUE = "router queue"
    PREFILL_QUEUE = "prefill queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of one request. ``start_s`` counts from arrival; ``delay_s`` is what the stage added to the whole.

    They differ for the transfer, most of which runs beside the prefill. ``tokens`` is what it worked on, 0 for waits.
    """

    stage: Stage
    worker: str
    start_s: float
    duration_s: float
    delay_s: float
    tokens: int = 0

    @property
    def unit(self) -> int:
        """What its usual duration is counted per."""
        return max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request that ended. ``began`` is Unix time; ``traceparent`` is W3C's, as the client sent it, or empty."""

    request_id: str
    traceparent: str
    began: float
    total_s: float
    first_token_s: float
    outcome: str
    summary: Summary | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Usual:
    """What a span's stage usually adds, in seconds; None while too few requests are known."""

    span: Span
    usual_s: float | None

    @property
    def excess_s(self) -> float:
        """What it added beyond that."""
        return self.span.delay_s - (self.usual_s or 0.0)


class TraceBook:
    """The last ``size`` requests; on the event loop's thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._delays: dict[Stage, deque[float]] = {stage: deque(maxlen=_SAMPLES) for stage in Stage}

    def add(
        self, request_id: str, traceparent: str, arrival: float, now: float, outcome: str, summary: Summary | None
    ) -> Trace:
        """A request ended; ``arrival`` and ``now`` are on one clock, ``summary`` is known if it finished well."""
        spans = tuple(_spans(summary)) if summary is not None else ()
        first = summary.timings.first_token_s if summary is not None else 0.0
        trace = Trace(
            request_id, traceparent, time.time() - (now - arrival), now - arrival, first, outcome, summary, spans
        )
        self._traces[request_id] = trace
        self._traces.move_to_end(request_id)
        if len(self._traces) > self._size:
            self._traces.popitem(last=False)
        for span in spans:
            self._delays[span.stage].append(span.delay_s / span.unit)
        level = logging.DEBUG if summary is not None or outcome in QUIET else logging.WARNING
        log.log(
            level,
            "request %s: %s after %.3f s",
            request_id,
            outcome,
            trace.total_s,
            extra={"request_id": request_id, "outcome": outcome},
        )
        return trace

    def get(self, request_id: str) -> Trace | None:
        """The trace of a request, if it is among the last ones."""
        return self._traces.get(request_id)

    def usual(self, trace: Trace) -> list[Usual]:
        """The stages of ``trace`` beside what they usually add."""
        found = []
        for span in trace.spans:
            samples = self._delays[span.stage]
            known = len(samples) >= _LEAST_SAMPLES
            found.append(Usual(span, statistics.median(samples) * span.unit if known else None))
        return found


def suspect(stages: Iterable[Usual]) -> Usual | None:
    """The stage that took longest beyond what it usually takes."""
    return max(stages, key=lambda usual: usual.excess_s, default=None)


def _spans(summary: Summary) -> Iterable[Span]:
    usage, timings = summary.usage, summary.timings
    first_worker = summary.prefill_worker or summary.decode_worker
    computed = usage.prefill_computed_tokens or usage.decode_computed_tokens
    in_router = timings.admission_s
    yield Span(Stage.ROUTER_QUEUE, "router", 0.0, in_router, in_router)
    waited = timings.queue_s - in_router
    yield Span(Stage.PREFILL_QUEUE, first_worker, in_router, waited, waited)
    yield Span(Stage.PREFILL, first_worker, timings.queue_s, timings.prefill_s, timings.prefill_s, computed)
    computed_at = timings.queue_s + timings.prefill_s
    confirmed_at = computed_at + timings.exposed_transfer_s
    if summary.prefill_worker and timings.transfer_s:
        start = max(0.0, confirmed_at - timings.transfer_s)
        exposed = timings.exposed_transfer_s
        yield Span(Stage.TRANSFER, summary.decode_worker, start, timings.transfer_s, exposed)
        scheduled = timings.schedule_s
        yield Span(Stage.DECODE_QUEUE, summary.decode_worker, confirmed_at, scheduled, scheduled)
    if usage.completion_tokens > 1:
        waits = (timings.exposed_transfer_s + timings.schedule_s) if summary.prefill_worker else 0.0
        stepping = max(0.0, timings.decode_s - waits)
        yield Span(
            Stage.DECODE,
            summary.decode_worker,
            timings.first_token_s,
            timings.decode_s,
            stepping,
            usage.completion_tokens - 1,
        )
