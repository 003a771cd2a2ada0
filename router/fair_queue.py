"""Who is served next: strict priorities, and within a priority fair shares of tokens between callers.

Each caller has a virtual time that grows by tokens ÷ weight when one of its requests is served, and is corrected once
it is known what the request really cost. The caller whose time is least goes first (start-time fair queueing: Goyal,
Vin, Cheng, "Start-time Fair Queuing", 1996). A caller that comes back starts no earlier than the least time of those
that wait: idleness earns no credit. No clock is read, so that every decision can be replayed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """A waiting request; ``cost`` in tokens, a smaller ``priority`` is served first."""

    caller: str
    weight: float
    priority: int
    cost: float
    number: int = 0
    waiting: bool = True

    def __lt__(self, other: Entry) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


@dataclass(slots=True)
class _Lane:
    """One caller's requests; ended ones stay in the heap until they come to its top."""

    time: float
    entries: list[Entry] = field(default_factory=list)
    cost: dict[int, float] = field(default_factory=dict)
    """Tokens that wait, by priority."""
    count: dict[int, int] = field(default_factory=dict)
    """Requests that wait, by priority."""


class FairQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._numbers = itertools.count(1)
        self._now = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, entry: Entry) -> None:
        """Lets a request wait."""
        lane = self._lanes.setdefault(entry.caller, _Lane(0.0))
        if not lane.cost:
            lane.time = max(lane.time, self._start())
        entry.number, entry.waiting = next(self._numbers), True
        heapq.heappush(lane.entries, entry)
        lane.cost[entry.priority] = lane.cost.get(entry.priority, 0.0) + entry.cost
        lane.count[entry.priority] = lane.count.get(entry.priority, 0) + 1
        self._size += 1

    def remove(self, entry: Entry) -> None:
        """Takes a request out that waits no longer. Idempotent."""
        if not entry.waiting:
            return
        entry.waiting = False
        self._size -= 1
        lane = self._lanes[entry.caller]
        lane.cost[entry.priority] -= entry.cost
        lane.count[entry.priority] -= 1
        if lane.count[entry.priority] == 0:
            del lane.cost[entry.priority], lane.count[entry.priority]
        while lane.entries and not lane.entries[0].waiting:
            heapq.heappop(lane.entries)

    def pop(self, may_start: Callable[[Entry], bool]) -> Entry | None:
        """Serves the next request of the first caller whose head may start; charges its caller."""
        heads = sorted(
            (lane.entries[0].priority, lane.time, lane.entries[0].number, caller)
            for caller, lane in self._lanes.items()
            if lane.entries
        )
        for *_, caller in heads:
            lane = self._lanes[caller]
            entry = lane.entries[0]
            if may_start(entry):
                self._now = max(self._now, lane.time)
                self.remove(entry)
                lane.time += entry.cost / entry.weight
                self._forget_idle()
                return entry
        return None

    def correct(self, entry: Entry, cost: float) -> None:
        """Charges what a served request really cost instead of what was expected."""
        lane = self._lanes.get(entry.caller)
        if lane is not None:
            lane.time += (cost - entry.cost) / entry.weight
        elif cost > entry.cost:
            self._lanes[entry.caller] = _Lane(self._now + (cost - entry.cost) / entry.weight)
        entry.cost = cost

    def ahead(self, caller: str, priority: int) -> float:
        """Tokens that would be served before a request that came now."""
        own = self._lanes.get(caller)
        start = self._start()
        mine = _served_before(own, priority) if own is not None else 0.0
        time = max(own.time, start) if own is not None else start
        weight = own.entries[0].weight if own is not None and own.entries else 1.0
        total = mine
        for other, lane in self._lanes.items():
            if other == caller or not lane.entries:
                continue
            first = sum(cost for level, cost in lane.cost.items() if level < priority)
            credit = max(0.0, time + mine / weight - lane.time) * lane.entries[0].weight
            total += first + min(lane.cost.get(priority, 0.0), credit)
        return total

    def _start(self) -> float:
        return min((lane.time for lane in self._lanes.values() if lane.cost), default=self._now)

    def _forget_idle(self) -> None:
        """A lane behind the present says nothing that a new one would not."""
        for caller in [name for name, lane in self._lanes.items() if not lane.cost and lane.time <= self._now]:
            del self._lanes[caller]


def _served_before(lane: _Lane, priority: int) -> float:
    return sum(cost for level, cost in lane.cost.items() if level <= priority)
