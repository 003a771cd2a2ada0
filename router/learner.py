"""What the router has measured of its workers, as costs in seconds for the routing policy.

1. A first token that a worker computed: seconds from dispatch to its arrival, over the tokens computed for it and
   ahead of it. Queue, prefill and the ways to and fro are all in it.
2. A confirmed copy: seconds that the stream waited for it after the prefill, over the tokens that decode lacked.
3. An answer's end: seconds per token, over the streams that ran beside it; its length; the share found in caches.

Before there are measurements a worker is taken to be like the others, and those to be like the priors, of which only
the shape is left once anything was measured: a new worker must seem neither slower nor faster than what is known of its
peers, or it would get no request to show what it can do, or all of them. Forgetting is
slow, see ``line_fit``; so a worker or a route that is not used any more is judged by its peers after a while, and is
tried again. One learner per router, on the event loop. Memory: one record per worker and pair in use, at most
``_MOST`` of a kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinpool.router.costs import EqualCosts, PairKey, WorkerKey
from twinpool.router.line_fit import Line, LineFit, Sums, measured

K = TypeVar("K", bound=Hashable)

_MOST = 4096
_TOKENS_SCALE, _STREAMS_SCALE = 64.0, 1.0
_PRIOR_WEIGHT, _PEERS_WEIGHT = 0.02, 0.5
_SMOOTHING = 0.05
_REFRESH_S = 1.0
_SPIKE, _SPIKE_AFTER = 3.0, 2.0
"""What was measured more often than this, at the worker or its peers, cannot seem more than so many times slower at
once: a pause is not a pace, nor is a worker's first request."""
_PRIOR = EqualCosts()


class _Family(Generic[K]):
    """Lines of one kind: what a key was measured at, then its peers, then the prior (known at 0 and ``large``)."""

    def __init__(self, prior: Line, large: float, scale: float) -> None:
        points = measured(0, prior.fixed_s, scale).plus(measured(large, prior.at(large), scale))
        self._shape = prior
        self._prior = points.scaled_to(_PRIOR_WEIGHT)
        self._scale = scale
        self._fits: dict[K, LineFit] = {}
        self._peers = LineFit()
        self._lines: dict[K, tuple[Line, float]] = {}
        """Lines as computed at a time."""

    def add(self, key: K, units: float, seconds: float, now: float) -> None:
        fit = self._fits.pop(key, None) or LineFit()
        self._fits[key] = fit  # the newest last
        if len(self._fits) > _MOST:
            del self._fits[next(iter(self._fits))]
        if fit.sums(now).count + self._peers.sums(now).count > _SPIKE_AFTER:
            seconds = min(seconds, _SPIKE * self.line(key, now).at(units))
        sums = measured(units, seconds, self._scale)
        fit.add(sums, now)
        self._peers.add(sums, now)
        self._lines.pop(key, None)

    def line(self, key: K, now: float) -> Line:
        known = self._lines.get(key)
        if known is not None and abs(now - known[1]) < _REFRESH_S:
            return known[0]
        line = self._sums(key, now).line()
        if len(self._lines) > _MOST:
            self._lines.clear()
        self._lines[key] = line, now
        return line

    def _sums(self, key: K, now: float) -> Sums:
        peers = self._peers.sums(now)
        prior = self._prior.slowed(peers.level(self._shape))
        background = prior.plus(peers.scaled_to(min(peers.count, _PEERS_WEIGHT)))
        fit = self._fits.get(key)
        return background if fit is None else background.plus(fit.sums(now))


class Learner:
    """See the module docstring; ``now`` is seconds of one monotonic clock everywhere."""

    def __init__(self) -> None:
        self.prefill: _Family[WorkerKey] = _Family(_PRIOR.prefill_line, 1024, _TOKENS_SCALE)
        self.pace: _Family[WorkerKey] = _Family(_PRIOR.pace_line, 16, _STREAMS_SCALE)
        self.handover: _Family[PairKey] = _Family(_PRIOR.handover_line, 4096, _TOKENS_SCALE)
        self.answer_tokens = _PRIOR.answer_tokens
        self.reuse = _PRIOR.reuse

    def costs(self, now: float) -> LearnedCosts:
        """The estimates at ``now``; valid until the next measurement."""
        return LearnedCosts(self, now)

    def first_token(self, worker: WorkerKey, tokens: float, seconds: float, now: float) -> None:
        """A worker computed a prompt's first token; ``tokens`` were computed for it and ahead of it."""
        self.prefill.add(worker, max(tokens, 0.0), seconds, now)

    def prompt(self, cached: int, computed: int) -> None:
        """Where a prompt's KV came from on the worker that computed it."""
        self.reuse += _SMOOTHING * (cached / max(cached + computed, 1) - self.reuse)

    def copied(self, prefill: WorkerKey, decode: WorkerKey, tokens: int, exposed_s: float, now: float) -> None:
        """A copy of ``tokens`` was confirmed, ``exposed_s`` after the prefill."""
        self.handover.add((prefill, decode), tokens, exposed_s, now)

    def answered(self, decode: WorkerKey, streams: int, tokens: int, decode_s: float, now: float) -> None:
        """An answer of ``tokens`` ended ``decode_s`` after its first token, beside ``streams`` others."""
        self.answer_tokens += _SMOOTHING * (tokens - self.answer_tokens)
        if tokens > 1:
            self.pace.add(decode, streams + 1, decode_s / (tokens - 1), now)


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """A learner's estimates at one moment; implements ``costs.Costs``."""

    learner: Learner
    now: float

    def prefill(self, worker: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.learner.prefill.line(worker, self.now)

    def handover(self, prefill: WorkerKey, decode: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.learner.handover.line((prefill, decode), self.now)

    def pace(self, worker: WorkerKey) -> Line:
        """See ``Costs``."""
        return self.learner.pace.line(worker, self.now)

    @property
    def answer_tokens(self) -> float:
        """See ``Costs``."""
        return self.learner.answer_tokens

    @property
    def reuse(self) -> float:
        """See ``Costs``."""
        return self.learner.reuse
