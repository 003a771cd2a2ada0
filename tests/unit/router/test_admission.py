"""The admission budget: limits of keys, early refusal, turns, and what a cancelled request leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from twinpool.config import RouterSection
from twinpool.errors import Overloaded
from twinpool.router.admission import Admission, Capacity, Ticket
from twinpool.router.caller import Caller

A, B = Caller("a"), Caller("b")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, slots: int = 2, prefill: int = 1000, **settings: Any) -> Admission:
    return Admission(RouterSection(**settings), lambda: Capacity(slots, prefill), clock)


async def turn(admission: Admission, caller: Caller = A, prompt: int = 10, priority: int = 0) -> tuple[Ticket, Any]:
    ticket = admission.admit(caller, priority)
    task = asyncio.ensure_future(ticket.turn(prompt, 20, 1))
    await asyncio.sleep(0)
    return ticket, task


async def settle(*tasks: Any) -> list[bool]:
    await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_turns_follow_slots_and_keys_alternate() -> None:
    admission = make(Clock(), slots=2)
    running = [await turn(admission) for _ in range(2)]
    waiting = [await turn(admission) for _ in range(3)]
    other = await turn(admission, B)
    assert await settle(*[task for _, task in running]) == [True, False]  # one key leaves a slot
    assert other[1].done()
    assert admission.queued == 4
    for ticket, _ in [running[0], other]:
        ticket.release(20)
    assert await settle(running[1][1], waiting[0][1]) == [True, False]
    for ticket, _ in running + waiting:
        ticket.release()
    assert await settle(*[task for _, task in waiting]) == [True] * 3
    assert (admission.in_flight, admission.queued, admission._running, admission._in_prefill) == (0, 0, 0, 0)
    assert admission._prefill_tokens == 0


async def test_a_key_below_its_share_waits_for_no_slot() -> None:
    admission = make(Clock(), slots=10)
    heavy = [await turn(admission) for _ in range(20)]
    started = sum(task.done() for _, task in heavy)
    assert started == 8
    light = [await turn(admission, B) for _ in range(7)]
    assert [task.done() for _, task in light] == [True] * 5 + [False] * 2  # five are its share
    for ticket, _ in heavy + light:
        ticket.release()
    assert admission._running == 0


async def test_what_comes_too_late_is_refused_instead_of_started() -> None:
    clock = Clock()
    admission = make(clock, slots=1)
    for _ in range(50):  # a second for twenty tokens
        ticket, _ = await turn(admission)
        ticket.first_token()
        clock.now += 1.0
        ticket.release(20)
    first, _ = await turn(admission)
    late = admission.admit(A, deadline_s=5.0, max_tokens=20)
    waiting = asyncio.ensure_future(late.turn(10, 20, 1))
    await asyncio.sleep(0)
    clock.now += 4.5
    first.release(20)
    with pytest.raises(Overloaded, match="would not end by its deadline"):
        await waiting
    late.release()
    assert (admission.in_flight, admission._running, admission.queued) == (0, 0, 0)


async def test_prompts_wait_for_room_in_prefill() -> None:
    admission = make(Clock(), slots=50, prefill=100)
    (first, _), (_, second) = await turn(admission, prompt=80), await turn(admission, prompt=30)
    assert not second.done()
    first.first_token()
    first.first_token()
    assert await settle(second) == [True]
    giant = make(Clock(), slots=1, prefill=100)
    assert (await turn(giant, prompt=5000))[1].done()


async def test_without_workers_the_flow_says_so() -> None:
    admission = make(Clock(), slots=0)
    assert all(task.done() for task in [(await turn(admission))[1] for _ in range(20)])


async def test_long_prompts_say_nothing_of_the_pace_of_answers() -> None:
    clock = Clock()
    admission = make(clock, slots=1)
    for _ in range(3):  # a prompt of minutes, a short answer
        ticket, task = await turn(admission)
        clock.now += 130.0
        ticket.first_token()
        clock.now += 0.1
        ticket.release(2)
        await task
    running, _ = await turn(admission)
    waiting = admission.admit(A, deadline_s=60.0, max_tokens=200)
    task = asyncio.ensure_future(waiting.turn(10, 200, 1))
    await asyncio.sleep(0)
    clock.now += 1.0
    running.release(1)
    assert await settle(task) == [True]
    await task  # it is not refused
    waiting.release()


async def test_refused_when_the_queue_is_longer_than_the_deadline() -> None:
    clock = Clock()
    admission = make(clock, slots=1, max_queue_s=5.0)
    anybody = Caller("", best_priority=-5)
    current, _ = await turn(admission, anybody)
    waiting = [await turn(admission, anybody) for _ in range(20)]  # 600 tokens expected
    for _ in range(4):  # 30 tokens a second
        current.first_token()
        clock.now += 1.0
        current.release(20)
        current, _ = waiting.pop(0)
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"would wait for about 1\d\.\d s.*allows 1.98 s") as caught:
        admission.admit(anybody, deadline_s=2.0)
    assert 10 < caught.value.retry_after_s < 20
    with pytest.raises(Overloaded, match="allows 5 s"):
        admission.admit(anybody, deadline_s=600.0)
    admission.admit(anybody, priority=-1, deadline_s=2.0).release()
    admission.admit(B, deadline_s=2.0).release()  # its share is free


async def test_limits_of_a_key() -> None:
    clock = Clock()
    admission = make(clock, slots=100)
    few = Caller("few", max_in_flight=1)
    ticket = admission.admit(few)
    with pytest.raises(Overloaded, match="max_in_flight"):
        admission.admit(few)
    ticket.release()
    admission.admit(few).release()

    metered = Caller("metered", tokens_per_minute=60)
    ticket, _ = await turn(admission, metered, prompt=50)  # with the answer expected, 70
    with pytest.raises(Overloaded, match="60 tokens per minute") as caught:
        admission.admit(metered)
    assert caught.value.retry_after_s == pytest.approx(11)
    ticket.release(5)  # it was 55
    admission.admit(metered).release()
    ticket, _ = await turn(admission, metered, prompt=10)
    ticket.release(5)
    with pytest.raises(Overloaded):
        admission.admit(metered)
    clock.now += 12
    admission.admit(metered).release()


async def test_one_key_leaves_places_for_others() -> None:
    admission = make(Clock(), max_queued=90)
    for _ in range(80):
        admission.admit(A)
    with pytest.raises(Overloaded, match="kept for others"):
        admission.admit(A)
    admission.admit(B)


async def test_accounts_do_not_pile_up() -> None:
    admission = make(Clock())
    for number in range(100):
        admission.admit(Caller(f"key-{number}")).release()
    assert len(admission._accounts) == 1
