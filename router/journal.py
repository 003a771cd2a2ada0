"""What becomes of requests, for people: kept for `twinpool trace`, logged, and exported."""

from __future__ import annotations

from twinpool.router.request import ResolvedRequest
from twinpool.router.summary import Summary
from twinpool.router.telemetry import Exporter
from twinpool.router.trace import TraceBook


class Journal:
    """Told by each flow at its end."""

    def __init__(self, book: TraceBook, exporter: Exporter) -> None:
        self.book = book
        self._exporter = exporter

    def ended(
        self, request: ResolvedRequest, arrival: float, now: float, outcome: str, summary: Summary | None
    ) -> None:
        """A request ended; times are on one clock."""
        trace = self.book.add(request.request_id, request.traceparent, arrival, now, outcome, summary)
        self._exporter.export(trace)

    def close(self) -> None:
        """Sends what waits."""
        self._exporter.close()
