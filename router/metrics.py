"""The router's metrics; labels are bounded (outcomes, reasons, roles), never a request id."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from twinpool.router.policy import Route
from twinpool.router.summary import Summary

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOTAL = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class RouterMetrics:
    """Counters and histograms of one router, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "twinpool_router_requests", "Requests that ended, by outcome", ["outcome"], registry=self.registry
        )
        self._rejections = Counter(
            "twinpool_router_rejections", "Requests refused before dispatch", ["reason"], registry=self.registry
        )
        self._in_flight = Gauge("twinpool_router_requests_in_flight", "Requests admitted now", registry=self.registry)
        self._queued = Gauge("twinpool_router_requests_queued", "Requests that wait here", registry=self.registry)
        self._workers = Gauge(
            "twinpool_router_workers", "Workers by role and state", ["role", "state"], registry=self.registry
        )
        self._routes = Counter(
            "twinpool_router_routes", "Dispatches by path and cause", ["path", "cause"], registry=self.registry
        )
        self._redispatches = Counter(
            "twinpool_router_redispatches", "Attempts started after a loss", ["reason"], registry=self.registry
        )
        self._ttft = Histogram(
            "twinpool_router_time_to_first_token_seconds",
            "Arrival to the first token at the router",
            buckets=_TTFT,
            registry=self.registry,
        )
        self._gap = Histogram(
            "twinpool_router_inter_token_seconds", "Gap between outputs", buckets=_GAP, registry=self.registry
        )
        self._tpot = Histogram(
            "twinpool_router_time_per_output_token_seconds",
            "First token to last, over the tokens between (TPOT)",
            buckets=_GAP,
            registry=self.registry,
        )
        self._total = Histogram(
            "twinpool_router_request_seconds", "Arrival to end", buckets=_TOTAL, registry=self.registry
        )
        self._tokens = Counter(
            "twinpool_router_tokens", "Tokens of finished requests", ["kind"], registry=self.registry
        )
        self._bytes = Counter(
            "twinpool_router_transfer_bytes", "KV bytes of finished requests", ["transport"], registry=self.registry
        )

    def routed(self, route: Route) -> None:
        """An attempt was dispatched."""
        path = "decode_only" if route.prefill is None else "disaggregated"
        self._routes.labels(path, route.cause.value).inc()

    def redispatched(self, reason: str) -> None:
        """An attempt was lost and another follows."""
        self._redispatches.labels(reason).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before dispatch."""
        self._rejections.labels(reason).inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token arrived."""
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens arrived after a gap."""
        self._gap.observe(seconds / count)

    def ended(self, outcome: str) -> None:
        """A dispatched request ended."""
        self._requests.labels(outcome).inc()

    def finished(self, summary: Summary, choices: int) -> None:
        """A request for so many choices finished well."""
        usage = summary.usage
        if (tokens := usage.completion_tokens // choices) > 1:
            self._tpot.observe(summary.timings.decode_s / (tokens - 1))
        self._total.observe(summary.timings.total_s)
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("completion", usage.completion_tokens),
            ("remote", usage.remote_tokens),
            ("decode_cached", usage.decode_cached_tokens),
            ("decode_computed", usage.decode_computed_tokens),
            ("prefill_cached", usage.prefill_cached_tokens),
            ("prefill_computed", usage.prefill_computed_tokens),
        ):
            self._tokens.labels(kind).inc(count)
        if usage.transfer_bytes:
            self._bytes.labels(usage.transport).inc(usage.transfer_bytes)

    def exposition(self, in_flight: int, queued: int, workers: dict[tuple[str, str], int]) -> bytes:
        """Prometheus text; ``workers`` counts them by (role, state)."""
        self._in_flight.set(in_flight)
        self._queued.set(queued)
        self._workers.clear()
        for (role, state), count in workers.items():
            self._workers.labels(role, state).set(count)
        return generate_latest(self.registry)
