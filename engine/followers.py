"""The other ranks of a worker, as rank 0's executor sees them: how they start, and their marks during steps."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twinpool.engine.channel import Channel, ChannelClosed
from twinpool.engine.errors import RanksLost
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.plan import OnLayers
from twinpool.engine.rank import Mark
from twinpool.engine.rank_step import RankStep
from twinpool.engine.runner import Written


class Followers(Protocol):
    """The other ranks of a worker, while it starts."""

    @property
    def parallel(self) -> ParallelContext:
        """Rank 0's place, with its connections."""

    def agree(self, num_blocks: int) -> int:
        """Waits until all have loaded their weights; they allocate, like rank 0, what the smallest can hold."""

    @property
    def channels(self) -> Sequence[Channel]:
        """One per rank from 1, on which ``rank.follow`` listens once ``agree`` has returned."""


class NoFollowers:
    """A worker of one rank."""

    parallel = ParallelContext()
    channels: Sequence[Channel] = ()

    def agree(self, num_blocks: int) -> int:
        """Returns ``num_blocks``."""
        return num_blocks


@dataclass(slots=True)
class _Step:
    """A step under way, and the ranks that are not done with it."""

    on_layers: OnLayers | None
    running: set[int]


class FollowerMarks:
    """What the other ranks say of the steps under way, which each runs in order. Does nothing if there are none.

    Raises RanksLost from any method when a rank is gone.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = dict(enumerate(channels, 1))
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        for number, channel in self._channels.items():
            self._ranks[channel.fileno()] = number
            self._poll.register(channel.fileno(), select.POLLIN)
        self._steps: deque[_Step] = deque()
        self._steps_of: dict[int, deque[_Step]] = {number: deque() for number in self._channels}
        self._logits_from: deque[int] = deque()

    @property
    def present(self) -> bool:
        """Whether there are other ranks."""
        return bool(self._channels)

    def begin(self, step: RankStep, on_layers: OnLayers | None) -> None:
        """Sends the step to all ranks; ``on_layers`` takes what they have written."""
        if not self._channels:
            return
        message = step.encode()
        begun = _Step(on_layers, set(self._channels))
        self._steps.append(begun)
        for number, channel in self._channels.items():
            self._steps_of[number].append(begun)
            try:
                channel.send(*message)
            except ChannelClosed as error:
                raise RanksLost(f"rank {number} is gone") from error

    def take(self, timeout_ms: int | None = 0) -> None:
        """Takes what has arrived; None waits until something has."""
        if not self._steps:
            return
        for descriptor, _ in self._poll.poll(timeout_ms):
            number = self._ranks[descriptor]
            try:
                mark, start, end = Mark.decode(self._channels[number].receive())
            except ChannelClosed as error:
                raise RanksLost(f"rank {number} is gone") from error
            steps = self._steps_of[number]
            if mark is Mark.DONE:
                steps.popleft().running.discard(number)
            elif mark is Mark.LOGITS:
                self._logits_from.append(number)
            elif (on_layers := steps[0].on_layers) is not None:
                on_layers(number, start, end, Written())

    def wait_logits(self, rank: int) -> None:
        """Waits until ``rank`` is about to send its next logits."""
        while rank not in self._logits_from:
            self.take(None)
        self._logits_from.remove(rank)

    def finish(self) -> None:
        """Waits until nothing of the oldest step can write any more on any rank."""
        while self._steps and self._steps[0].running:
            self.take(None)
        if self._steps:
            self._steps.popleft()
