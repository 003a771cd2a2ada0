"""Whether drafts pay: learned from measured steps, per batch size.

Verifying k drafts makes a step longer (little at small batches, which wait for memory; much at large ones, which
compute) and yields the accepted ones as extra tokens. Speculation pays while

    tokens per request and step with drafts / step time with drafts  >  1 / step time without

so both times and the acceptance are tracked for each batch-size bucket (powers of two) as moving averages. What is not
in use is probed now and then, for both can change with the traffic: drafts that do not pay are tried for a few steps
after ``probe_interval`` plain ones, and a plain step is timed after as many with drafts. Searching costs, too: after
``patience`` steps in a row in which nothing was found, each further one is followed by a pause twice as long as the one
before, up to ``longest_pause`` steps; a draft found ends that. No clock and no randomness: the same observations give
the same decisions.

A step: ``begin_step`` decides, ``propose`` gives drafts or none, ``end_step`` learns. A draft model or EAGLE joins as
another ``ports.Proposer``; nothing here depends on where drafts come from. Decisions never change the output: drafts
are verified by the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.ports import Proposer
from twinpool.engine.request import Request


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How fast to learn. ``margin`` is the gain that drafts must show to be switched on, against flapping."""

    smoothing: float = 0.1
    margin: float = 0.03
    probe_interval: int = 64
    probe_steps: int = 4
    patience: int = 8
    longest_pause: int = 64


@dataclass(slots=True)
class _Average:
    """Exponential moving average; the plain mean until it has 1 / smoothing values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, smoothing: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(smoothing, 1 / self.count)


@dataclass(slots=True)
class _Bucket:
    """What is known about one range of batch sizes."""

    plain_s: _Average
    draft_s: _Average
    tokens: _Average
    drafting: bool = True
    steps_since_probe: int = 0
    probes_left: int = 0
    fruitless: int = 0
    """Searches in a row that found nothing."""
    pause: int = 0
    """Steps left without a search."""


class SpeculationController:
    """Decides per step whether to draft. Used by the engine thread."""

    def __init__(self, settings: SpeculationSettings | None = None) -> None:
        self._settings = settings or SpeculationSettings()
        self._buckets: dict[int, _Bucket] = {}

    def should_draft(self, batch_size: int) -> bool:
        """Whether the coming step of ``batch_size`` generating requests should verify drafts. Does not mutate."""
        bucket = self._bucket(batch_size)
        return bucket.pause == 0 and bucket.drafting != (bucket.probes_left > 0)

    def observe(self, batch_size: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learns from a step that only generated (no prompt tokens: their time would be counted as the drafts').

        ``num_drafts`` and ``num_accepted`` are sums over the batch; a step without drafts counts as a plain one or, if
        ``should_draft`` holds, as a search that found nothing, whose time is neither's. ``seconds`` include the search.
        """
        bucket = self._bucket(batch_size)
        sought = self.should_draft(batch_size)
        self._search(bucket, sought, found=num_drafts > 0)
        smoothing = self._settings.smoothing
        if num_drafts:
            bucket.draft_s.add(seconds, smoothing)
            bucket.tokens.add(1 + num_accepted / batch_size, smoothing)
        elif not sought:
            bucket.plain_s.add(seconds, smoothing)
        self._decide(bucket, drafted=num_drafts > 0)

    def gain(self, batch_size: int) -> float | None:
        """Tokens per second with drafts over those without, as learned; None until both were seen."""
        return _gain(self._bucket(batch_size))

    def _bucket(self, batch_size: int) -> _Bucket:
        key = max(batch_size, 1).bit_length()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(_Average(), _Average(), _Average())
        return bucket

    def _search(self, bucket: _Bucket, sought: bool, found: bool) -> None:
        if found:
            bucket.fruitless = bucket.pause = 0
        elif sought:
            bucket.fruitless += 1
            doublings = bucket.fruitless - self._settings.patience
            bucket.pause = min(1 << min(doublings, 16), self._settings.longest_pause) if doublings >= 0 else 0
        elif bucket.pause:
            bucket.pause -= 1

    def _decide(self, bucket: _Bucket, drafted: bool) -> None:
        settings = self._settings
        gain = _gain(bucket)
        if bucket.probes_left:
            # A probe counts only when the step did what was probed: no draft may have been found.
            if drafted != bucket.drafting:
                bucket.probes_left -= 1
        else:
            bucket.steps_since_probe += 1
            if bucket.steps_since_probe >= settings.probe_interval or (gain is None and bucket.steps_since_probe >= 8):
                bucket.steps_since_probe = 0
                # One plain step tells its time; acceptance needs a few steps to show.
                bucket.probes_left = 1 if bucket.drafting else settings.probe_steps
        if gain is not None and bucket.probes_left == 0:
            bucket.drafting = gain > (1.0 if bucket.drafting else 1.0 + settings.margin)


def _gain(bucket: _Bucket) -> float | None:
    if not bucket.plain_s.count or not bucket.draft_s.count or bucket.draft_s.value <= 0:
        return None
    return bucket.tokens.value * bucket.plain_s.value / bucket.draft_s.value


class SteadyProposer:
    """Implements ``ports.Speculation``: another proposer's drafts in every step, whether or not they pay."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def begin_step(self, batch_size: int) -> None:
        """Nothing to decide."""

    def end_step(self, batch_size: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Nothing to learn."""

    def propose(self, request: Request) -> list[int]:
        """See ``ports.Proposer``."""
        return self._proposer.propose(request)


class AdaptiveProposer:
    """Implements ``ports.Speculation``: another proposer's drafts while they pay, none otherwise."""

    def __init__(self, proposer: Proposer, controller: SpeculationController) -> None:
        self._proposer = proposer
        self._controller = controller
        self._enabled = True

    def begin_step(self, batch_size: int) -> None:
        """Decides for the coming step; ``batch_size`` counts the generating requests."""
        self._enabled = batch_size > 0 and self._controller.should_draft(batch_size)

    def end_step(self, batch_size: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Tells what the step did; only for steps without prompt tokens. See ``SpeculationController.observe``."""
        if batch_size > 0:
            self._controller.observe(batch_size, num_drafts, num_accepted, seconds)

    def propose(self, request: Request) -> list[int]:
        """See ``ports.Proposer``."""
        return self._proposer.propose(request) if self._enabled else []
