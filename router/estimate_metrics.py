"""Metrics of what routing reckons with: the learned costs of connected workers and linked pairs, at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twinpool.router.registry import Registry
from twinpool.router.routing import Routing


class EstimateMetrics(Collector):
    """See the module docstring."""

    def __init__(self, registry: Registry, routing: Routing) -> None:
        self._registry = registry
        self._routing = routing

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The families."""
        prefill = GaugeMetricFamily(
            "twinpool_router_prefill_estimate_seconds",
            "Estimated seconds to a first token: the fixed part, and per token computed or queued ahead",
            labels=("worker", "role", "part"),
        )
        pace = GaugeMetricFamily(
            "twinpool_router_pace_estimate_seconds",
            "Estimated seconds per token of an answer that decodes alone",
            labels=("worker",),
        )
        handover = GaugeMetricFamily(
            "twinpool_router_handover_estimate_seconds",
            "Estimated wait for a copy after the prefill: the fixed part, and per token read",
            labels=("worker", "prefill_worker", "part"),
        )
        costs = self._routing.costs()
        for view in self._registry.views():
            name, role = view.info.worker_id, view.info.role
            line = costs.prefill(view.key)
            prefill.add_metric((name, role, "fixed"), line.fixed_s)
            prefill.add_metric((name, role, "per_token"), line.per_unit_s)
            if role != "decode":
                continue
            pace.add_metric((name,), costs.pace(view.key).at(1))
            for link in view.report.links:
                if link.linked:
                    line = costs.handover((link.worker_id, link.epoch), view.key)
                    handover.add_metric((name, link.worker_id, "fixed"), line.fixed_s)
                    handover.add_metric((name, link.worker_id, "per_token"), line.per_unit_s)
        yield from (prefill, pace, handover)
