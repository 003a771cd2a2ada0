"""Figures of a series: the median first, because single values on a shared machine mean little."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A series in milliseconds; ``p90`` is its 90th percentile."""

    median: float
    p90: float
    least: float
    count: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Figure:
        """From seconds; a series without values has none."""
        series = sorted(1e3 * value for value in seconds)
        if not series:
            return cls(float("nan"), float("nan"), float("nan"), 0)
        p90 = series[min(len(series) - 1, int(0.9 * len(series)))]
        return cls(round(statistics.median(series), 3), round(p90, 3), round(series[0], 3), len(series))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured. A load above what the measurement itself causes makes times useless."""

    cpus: int
    load_before: float

    @classmethod
    def now(cls) -> Machine:
        """This machine."""
        return cls(os.cpu_count() or 0, round(os.getloadavg()[0], 2))
