"""Traces to OpenTelemetry: a span per request, and one per stage, made when the request has ended.

Only the router exports: it knows all stages, and so workers need no library and no clock in common. Needs the extra
``otel``; further settings are OpenTelemetry's own environment variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from twinpool.errors import ConfigError
from twinpool.router.trace import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_NANO = 1e9


class Exporter(Protocol):
    """Takes traces; must not block."""

    def export(self, trace: Trace) -> None:
        """A request ended."""

    def close(self) -> None:
        """Sends what waits, for a moment at most."""


class NoExporter:
    """When no endpoint is configured."""

    def export(self, trace: Trace) -> None:
        """See ``Exporter``."""

    def close(self) -> None:
        """See ``Exporter``."""


class OtelExporter:
    """Spans through OpenTelemetry's SDK, which sends in batches from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "twinpool"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twinpool.router")

    def export(self, trace: Trace) -> None:
        """See ``Exporter``."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": trace.traceparent})
        began = trace.began
        root = self._tracer.start_span(
            "generate", parent, SpanKind.SERVER, _attributes(trace), start_time=int(began * _NANO)
        )
        if trace.summary is None and trace.outcome != "cancelled":
            root.set_status(Status(StatusCode.ERROR, trace.outcome))
        inside = set_span_in_context(root)
        for span in trace.spans:
            start = began + span.start_s
            child = self._tracer.start_span(
                span.stage.value, inside, attributes={"twinpool.worker": span.worker}, start_time=int(start * _NANO)
            )
            child.end(int((start + span.duration_s) * _NANO))
        root.end(int((began + trace.total_s) * _NANO))

    def close(self) -> None:
        """See ``Exporter``."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def make_exporter(endpoint: str | None) -> Exporter:
    """Exports to an OTLP collector (gRPC, ``http://host:4317``), or nowhere.

    Raises:
        ConfigError: the extra is not installed.
    """
    if endpoint is None:
        return NoExporter()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "router.otlp_endpoint is set, but OpenTelemetry is not installed: pip install 'twinpool[otel]'"
        ) from error
    return OtelExporter(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))


def _attributes(trace: Trace) -> dict[str, str | int]:
    found: dict[str, str | int] = {"twinpool.request_id": trace.request_id, "twinpool.outcome": trace.outcome}
    if trace.summary is not None:
        usage = trace.summary.usage
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "twinpool.remote_tokens": usage.remote_tokens,
            "twinpool.redispatches": usage.redispatches,
            "twinpool.transport": usage.transport,
            "twinpool.route_reason": usage.route_reason,
        }
    return found
