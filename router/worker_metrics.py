"""Metrics of the workers, from their reports: one scrape of a router shows both pools.

Counters start at 0 when a worker restarts, as Prometheus expects. A worker that is not connected shows nothing but
``twinpool_worker_up`` 0, with its address while it was never connected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from twinpool.router.messages import Report
from twinpool.router.registry import Registry
from twinpool.router.worker_session import WorkerSession

_WORKER = ("worker", "role")

_GAUGES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("free_blocks", "KV blocks that can be allocated, cached ones included", lambda report: report.free_blocks),
    ("queued_tokens", "Prompt tokens that wait or are being computed", lambda report: report.queued_tokens),
    ("open_exchanges", "KV exchanges that have not ended", lambda report: report.open_exchanges),
    (
        "quarantined_blocks",
        "KV blocks kept because a read may still land in them",
        lambda report: report.quarantined_blocks,
    ),
    ("draining", "1 while the worker refuses new requests", lambda report: report.draining),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("steps", "Engine steps", lambda report: report.steps),
    ("preemptions", "Requests that lost their blocks and were computed again", lambda r: r.totals.preemptions),
    ("batches", "Batches that were computed", lambda r: r.totals.batches),
    ("batch_requests", "Requests of all batches: over batches, the batch size", lambda r: r.totals.batch_requests),
    ("batch_tokens", "Tokens of all batches", lambda r: r.totals.batch_tokens),
    ("step_seconds", "Seconds of all batches: over batches, the time of a step", lambda r: r.totals.batch_s),
    ("transfer_bytes", "Bytes of confirmed KV copies (decode)", lambda r: r.totals.transfer_bytes),
    ("transfer_seconds", "First readable segment to confirmation (decode)", lambda r: r.totals.transfer_s),
    (
        "exposed_transfer_seconds",
        "Prompt computed to copy confirmed: the part of the transfer that nothing hides (decode)",
        lambda r: r.totals.exposed_transfer_s,
    ),
)
_OUTCOMES: tuple[tuple[str, str, str, tuple[tuple[str, Callable[[Report], float]], ...]], ...] = (
    (
        "transfers",
        "decode",
        "KV exchanges that ended on a decode worker: confirmed, or unconfirmed and lost",
        (("confirmed", lambda r: r.totals.transfers), ("lost", lambda r: r.totals.transfers_lost)),
    ),
    (
        "holds",
        "prefill",
        "Promised KV that ended on a prefill worker: released by its reader, or revoked",
        (("released", lambda r: r.totals.holds_released), ("revoked", lambda r: r.totals.holds_revoked)),
    ),
)
_STATES: tuple[tuple[str, Callable[[Report], float]], ...] = (
    ("running", lambda report: report.running),
    ("waiting", lambda report: report.waiting),
    ("loading", lambda report: report.loading),
    ("held", lambda report: report.held),
)

Family = GaugeMetricFamily | CounterMetricFamily


class WorkerMetrics(Collector):
    """Reads the newest reports at each scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        """The families of all connected workers."""
        up = GaugeMetricFamily("twinpool_worker_up", "1 while the worker is connected", labels=_WORKER)
        restarts = CounterMetricFamily(
            "twinpool_worker_restarts", "Times that the worker came back as another process", labels=_WORKER
        )
        ready = GaugeMetricFamily("twinpool_router_ready", "1 while a request sent now could be served")
        ready.add_metric((), not self._registry.not_ready_reason)
        connected: list[tuple[Sequence[str], WorkerSession]] = []
        for session in self._registry.sessions:
            info = session.info
            labels = (session.address, "unknown") if info is None else (info.worker_id, info.role)
            up.add_metric(labels, session.usable)
            restarts.add_metric(labels, session.restarts)
            if info is not None and session.usable:
                connected.append((labels, session))
        yield from (ready, up, restarts)
        yield from _loads(connected)
        yield from _outcomes(connected)
        yield self._links(connected)

    def _links(self, connected: Sequence[tuple[Sequence[str], WorkerSession]]) -> Family:
        family = GaugeMetricFamily(
            "twinpool_worker_link_bytes_per_second",
            "Bandwidth of the warm-up read of a decode worker's link; 0 while not linked",
            labels=("worker", "prefill_worker", "transport"),
        )
        for (worker, _), session in connected:
            for link in self._registry.links_of(session):
                speed = link.gigabytes_per_second * 1e9 if link.linked else 0.0
                family.add_metric((worker, link.worker_id, link.transport), speed)
        return family


def _loads(connected: Sequence[tuple[Sequence[str], WorkerSession]]) -> Iterable[Family]:
    requests = GaugeMetricFamily("twinpool_worker_requests", "Requests by state", labels=(*_WORKER, "state"))
    blocks = GaugeMetricFamily("twinpool_worker_blocks", "KV blocks of the worker", labels=_WORKER)
    for labels, session in connected:
        assert session.info is not None
        blocks.add_metric(labels, session.info.num_blocks)
        for state, value in _STATES:
            requests.add_metric((*labels, state), value(session.report))
    yield requests
    yield blocks
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"twinpool_worker_{name}", text, labels=_WORKER)
        for labels, session in connected:
            gauge.add_metric(labels, value(session.report))
        yield gauge


def _outcomes(connected: Sequence[tuple[Sequence[str], WorkerSession]]) -> Iterable[Family]:
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"twinpool_worker_{name}", text, labels=_WORKER)
        for labels, session in connected:
            counter.add_metric(labels, value(session.report))
        yield counter
    for name, role, text, outcomes in _OUTCOMES:
        counter = CounterMetricFamily(f"twinpool_worker_{name}", text, labels=("worker", "outcome"))
        for (worker, worker_role), session in connected:
            for outcome, value in outcomes if worker_role == role else ():
                counter.add_metric((worker, outcome), value(session.report))
        yield counter
