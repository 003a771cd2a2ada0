"""What routes cost: the figures that the policy reckons with, in seconds, whoever measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinpool.router.line_fit import Line

WorkerKey = tuple[str, int]
"""Identity and epoch: a restarted worker is another worker."""
PairKey = tuple[WorkerKey, WorkerKey]
"""Prefill worker and decode worker."""


class Costs(Protocol):
    """Estimates at one moment; asking changes nothing."""

    def prefill(self, worker: WorkerKey) -> Line:
        """Seconds from dispatch to the first token, over tokens to compute for it and before it."""

    def handover(self, prefill: WorkerKey, decode: WorkerKey) -> Line:
        """Seconds that a stream waits for its copy after the prefill, over tokens that decode lacks."""

    def pace(self, worker: WorkerKey) -> Line:
        """Seconds per token of an answer, over streams that run on its decode worker."""

    @property
    def answer_tokens(self) -> float:
        """Usual length of an answer."""

    @property
    def reuse(self) -> float:
        """Usual share of a prompt that is found in a cache: the worth of a cached token."""


_PREFILL, _HANDOVER, _PACE = Line(0.01, 2e-4), Line(0.01, 1e-6), Line(0.02, 5e-4)


@dataclass(frozen=True, slots=True)
class EqualCosts:
    """The same for every worker: priors before anything is measured, and tests."""

    prefill_line: Line = _PREFILL
    handover_line: Line = _HANDOVER
    pace_line: Line = _PACE
    answer_tokens: float = 64.0
    reuse: float = 0.1

    def prefill(self, worker: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.prefill_line

    def handover(self, prefill: WorkerKey, decode: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.handover_line

    def pace(self, worker: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.pace_line
