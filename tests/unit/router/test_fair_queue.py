"""Shares, priorities and estimates of the fair queue, and a simulated overload on an injected clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from twinpool.router.fair_queue import Entry, FairQueue
from twinpool.router.service_rate import ServiceRate


def entry(caller: str, cost: float = 100.0, priority: int = 0, weight: float = 1.0) -> Entry:
    return Entry(caller, weight, priority, cost)


def pop(queue: FairQueue) -> Entry:
    found = queue.pop(lambda _: True)
    assert found is not None
    return found


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_backlogged_callers_share_tokens_by_weight(weight: float, share: float) -> None:
    queue, rng, served = FairQueue(), random.Random(1), Counter[str]()
    for _ in range(2000):
        queue.add(entry("small", rng.randint(10, 50), weight=weight))
        queue.add(entry("large", rng.randint(100, 2000)))
    while sum(served.values()) < 30_000:
        item = pop(queue)
        served[item.caller] += int(item.cost)
    assert served["small"] / sum(served.values()) == pytest.approx(share, abs=2000 / 30_000)


def test_idleness_earns_no_credit() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(entry("busy"))
    for _ in range(20):
        pop(queue)
    for _ in range(30):
        queue.add(entry("late"))
    callers = [pop(queue).caller for _ in range(20)]
    assert abs(callers.count("late") - 10) <= 1


def test_what_requests_really_cost_counts() -> None:
    queue = FairQueue()
    for _ in range(30):
        queue.add(entry("cheap"))
        queue.add(entry("dear"))
    callers = Counter[str]()
    for _ in range(30):
        item = pop(queue)
        callers[item.caller] += 1
        queue.correct(item, 100.0 if item.caller == "cheap" else 400.0)
    assert callers["cheap"] == 4 * callers["dear"]


def test_priorities_come_before_shares_and_arrival_within() -> None:
    queue = FairQueue()
    late, early, urgent = entry("a", priority=5), entry("a"), entry("b", priority=-1)
    for item in (late, early, urgent):
        queue.add(item)
    assert [pop(queue), pop(queue), pop(queue)] == [urgent, early, late]


def test_removed_requests_are_not_served_and_leave_nothing() -> None:
    queue = FairQueue()
    items = [entry("a") for _ in range(5)]
    for item in items:
        queue.add(item)
    for item in items[:-1]:
        queue.remove(item)
        queue.remove(item)
    assert len(queue) == 1
    assert pop(queue) is items[-1]
    assert queue.pop(lambda _: True) is None
    assert not queue._lanes["a"].entries


def test_a_caller_that_must_wait_does_not_hold_up_others() -> None:
    queue = FairQueue()
    queue.add(entry("full"))
    queue.add(entry("free"))
    found = queue.pop(lambda item: item.caller != "full")
    assert found is not None
    assert found.caller == "free"
    assert len(queue) == 1


def test_estimate_counts_what_would_be_served_first() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add(entry("heavy"))
    assert queue.ahead("heavy", 0) == 1000
    assert queue.ahead("heavy", -1) == 0
    assert queue.ahead("light", 0) == 0  # its turn comes next
    assert queue.ahead("light", 1) == 1000
    queue.add(entry("light"))
    assert queue.ahead("light", 0) == pytest.approx(200, abs=100)


def test_rate_is_measured_only_while_requests_wait() -> None:
    now = [0.0]
    rate = ServiceRate(lambda: now[0])
    rate.served(1e6)
    assert rate.wait_s(100) == 0
    rate.queue_is(True)
    for _ in range(20):
        now[0] += 0.1
        rate.served(50)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.11)
    assert rate.wait_s(1000) == pytest.approx(2, rel=0.11)
    rate.queue_is(False)
    now[0] += 100
    rate.served(1)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.11)


def simulate(heavy_per_s: float, light_per_s: float, slots: int = 8, seconds: float = 400.0) -> list[float]:
    """Waiting times of ``light``, in seconds; a request of either takes a slot for 0.5 to 1.5 s."""
    rng, queue, events, number = random.Random(7), FairQueue(), [], 0
    for caller, rate in (("heavy", heavy_per_s), ("light", light_per_s)):
        at = 0.0
        while rate and (at := at + rng.expovariate(rate)) < seconds:
            events.append((at, number := number + 1, caller))
    heapq.heapify(events)
    arrivals: dict[int, float] = {}
    waits: list[float] = []
    while events:
        now, _, caller = heapq.heappop(events)
        if caller == "end":
            slots += 1
        else:
            item = entry(caller)
            queue.add(item)
            arrivals[id(item)] = now
        while slots and (item := queue.pop(lambda _: True)) is not None:  # type: ignore[assignment]
            slots -= 1
            number += 1
            heapq.heappush(events, (now + rng.uniform(0.5, 1.5), number, "end"))
            if item.caller == "light":
                waits.append(now - arrivals[id(item)])
    return sorted(waits)


def test_a_caller_with_ten_times_the_load_delays_another_by_one_slot_at_most() -> None:
    waits = simulate(heavy_per_s=20.0, light_per_s=2.0)
    alone = simulate(heavy_per_s=0.0, light_per_s=2.0)
    p99 = waits[int(0.99 * len(waits))]
    assert alone[int(0.99 * len(alone))] < 0.2
    assert p99 < 1.5  # the longest that all slots can be taken; without fair shares the queue grows for 400 s
