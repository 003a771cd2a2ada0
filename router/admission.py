"""The router's one admission budget, and the order in which requests start.

1. ``admit``, before anything is tokenised: refuses while draining, over ``max_queued``, over a limit of the caller's
   key, or when by estimate the request would wait longer than ``max_queue_s`` or not end by its deadline. Else a
   ``Ticket``.
2. ``Ticket.turn`` waits in the fair queue until the pools have room: a slot in the decode batches (a quarter more than
   there are, since some requests are still in prefill) and, until its first token, room in the prefill window. What
   waits in workers is thereby little, and the fair queue decides. A caller that uses less than its share of the slots
   does not wait for one: its first token needs none. What could not end by its deadline any more is refused instead of
   started.
3. ``Ticket.first_token`` gives the room in the prefill window back, ``Ticket.release`` the rest. The flow calls both.

One key cannot fill the budget or the slots alone: it may hold at most eight times what it leaves free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.config import RouterSection
from twinpool.errors import Overloaded, Unavailable
from twinpool.router.caller import ANYBODY, Caller
from twinpool.router.fair_queue import Entry, FairQueue
from twinpool.router.policy import WorkerView
from twinpool.router.service_rate import ServiceRate

_SMOOTHING = 0.1
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_FIRST_ANSWER = 128.0
"""Tokens expected of an answer before any has ended."""
_IN_PREFILL = 1.25
_SHARE = 8
_CAUTION = 1.25
"""What estimates of waiting are multiplied by: a late refusal is worse than an early one."""
_OVERFULL = 2
"""All slots may be taken so many times, where keys start that use less than their share."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the connected workers run at once: choices, and prompt tokens before their first token."""

    slots: int
    prefill_tokens: int


def capacity(views: Sequence[WorkerView], section: RouterSection) -> Capacity:
    """The capacity of the connected workers that do not drain; zero when none is connected."""
    usable = [view.info for view in views if not view.report.draining]
    batches = sum(info.max_num_seqs for info in usable if info.role == "decode")
    prefills = sum(info.role == "prefill" or section.disaggregate != "always" for info in usable)
    return Capacity(-int(-batches * _IN_PREFILL // 1), prefills * section.prefill_window)


class _Account:
    """What one caller uses now."""

    def __init__(self, caller: Caller, now: float) -> None:
        self.caller = caller
        self.in_flight = 0
        self.running = 0
        self._balance = float(caller.tokens_per_minute or 0)
        self._filled = now

    def empty_for_s(self, now: float) -> float:
        """Seconds until the key may use tokens again; 0 when it may now."""
        per_minute = self.caller.tokens_per_minute
        if per_minute is None:
            return 0.0
        self._balance = min(self._balance + (now - self._filled) * per_minute / 60, per_minute)
        self._filled = now
        return 0.0 if self._balance > 0 else (1 - self._balance) * 60 / per_minute

    def charge(self, tokens: float) -> None:
        """Takes tokens, or gives them back when negative."""
        self._balance -= tokens

    def is_idle(self, now: float) -> bool:
        """Whether a new account would say the same."""
        full = self.caller.tokens_per_minute is None or (self.empty_for_s(now), self._balance)[1] >= (
            self.caller.tokens_per_minute
        )
        return self.in_flight == 0 and full


class Ticket:
    """A place in the budget; released once."""

    def __init__(self, admission: Admission, account: _Account, priority: int, deadline: float | None) -> None:
        self._admission = admission
        self.account = account
        self.priority = priority
        self.deadline = deadline
        self.max_tokens = 0
        self.enqueued = 0.0
        self.first_token_at: float | None = None
        self.entry: Entry | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.prompt_tokens = 0
        self.choices = 0
        self.in_prefill = False
        self.running = False
        self._released = False

    async def turn(self, prompt_tokens: int, max_tokens: int, choices: int) -> None:
        """Returns when the request may start, or when the ticket was released meanwhile.

        Raises:
            Overloaded: the turn came so late that the request would not end by its deadline.
        """
        if self._released:
            return
        self.prompt_tokens, self.choices, self.max_tokens = prompt_tokens, choices, max_tokens
        self.waiter = asyncio.get_running_loop().create_future()
        self._admission.enqueue(self, prompt_tokens + choices * self._admission.expected_answer(max_tokens))
        await self.waiter

    def first_token(self) -> None:
        """The prompt is computed. Idempotent."""
        if self.in_prefill:
            self._admission.left_prefill(self)

    def release(self, completion_tokens: int = 0) -> None:
        """Gives the place back; ``completion_tokens`` is what was generated. Idempotent."""
        if not self._released:
            self._released = True
            self._admission.leave(self, completion_tokens)
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)


class Admission:
    """Counts requests, refuses what exceeds the limits, and starts the rest in fair order."""

    def __init__(
        self,
        section: RouterSection,
        find_capacity: Callable[[], Capacity] = lambda: Capacity(0, 0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = section.max_queued
        self._max_queue_s = section.max_queue_s
        self._find_capacity = find_capacity
        self._clock = clock
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue = FairQueue()
        self._waiting: dict[int, Ticket] = {}
        self._rate = ServiceRate(clock)
        self._accounts: dict[str, _Account] = {}
        self._answer = _FIRST_ANSWER
        self._token_s = 0.0
        self._last_end: float | None = None
        self._gap_s = 1.0
        self._running = 0
        self._in_prefill = 0
        self._prefill_tokens = 0
        self.in_flight = 0

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def admit(
        self, caller: Caller = ANYBODY, priority: int = 0, deadline_s: float | None = None, max_tokens: int = 1
    ) -> Ticket:
        """Takes one place.

        Raises:
            Unavailable: the router drains.
            Overloaded: a limit is reached, or the queue is too long for the deadline; with the time to come back.
        """
        if self._draining:
            raise Unavailable("the router is shutting down; send the request to another one")
        now = self._clock()
        account = self._account(caller, now)
        self._check_limits(account, now)
        wait_s = self._rate.wait_s(self._queue.ahead(caller.name, priority))
        bound_s = self._max_queue_s
        if deadline_s is not None:
            bound_s = min(bound_s, max(0.0, deadline_s - self.expected_answer(max_tokens) * self._token_s))
        if wait_s * _CAUTION > bound_s:
            raise Overloaded(
                f"the request would wait for about {wait_s:.1f} s, and its deadline or router.max_queue_s allows "
                f"{bound_s:.3g} s; retry later",
                _clamp(wait_s - bound_s),
            )
        account.in_flight += 1
        self.in_flight += 1
        self._idle.clear()
        return Ticket(self, account, priority, None if deadline_s is None else now + deadline_s)

    def _check_limits(self, account: _Account, now: float) -> None:
        caller = account.caller
        if self.in_flight >= self._limit:
            raise Overloaded(
                f"{self.in_flight} requests are in flight and router.max_queued is {self._limit}; retry later",
                self.retry_after_s,
            )
        if caller.name and account.in_flight >= _SHARE * (self._limit - self.in_flight):
            raise Overloaded(
                f"{account.in_flight} requests of key {caller.name} are in flight, and the "
                f"{self._limit - self.in_flight} places left (router.max_queued) are kept for others; retry later",
                self.retry_after_s,
            )
        if caller.max_in_flight is not None and account.in_flight >= caller.max_in_flight:
            raise Overloaded(
                f"{account.in_flight} requests of key {caller.name} are in flight, its max_in_flight; retry later",
                self.retry_after_s,
            )
        empty_s = account.empty_for_s(now)
        if empty_s > 0:
            raise Overloaded(
                f"key {caller.name} has used its {caller.tokens_per_minute} tokens per minute; retry later",
                _clamp(empty_s),
            )

    def _account(self, caller: Caller, now: float) -> _Account:
        account = self._accounts.get(caller.name)
        if account is None:
            for name in [name for name, known in self._accounts.items() if known.is_idle(now)]:
                del self._accounts[name]
            account = self._accounts[caller.name] = _Account(caller, now)
        account.caller = caller  # limits may have changed
        return account

    def expected_answer(self, max_tokens: int) -> float:
        """Tokens that one choice is likely to get."""
        return min(float(max_tokens), self._answer)

    def enqueue(self, ticket: Ticket, cost: float) -> None:
        """Lets a ticket wait for its turn; called by tickets."""
        caller = ticket.account.caller
        ticket.entry = Entry(caller.name, caller.weight, ticket.priority, cost)
        self._queue.add(ticket.entry)
        self._waiting[id(ticket.entry)] = ticket
        ticket.enqueued = self._clock()
        ticket.account.charge(cost)
        self.pump()

    def pump(self) -> None:
        """Starts what fits; called whenever room or a request may have come."""
        if len(self._queue):
            room, now = self._find_capacity(), self._clock()
            while (entry := self._queue.pop(lambda entry: self._fits(self._waiting[id(entry)], room))) is not None:
                ticket = self._waiting.pop(id(entry))
                if self._is_too_late(ticket, now):
                    self._refuse(ticket, entry)
                else:
                    self._start(ticket)
        self._rate.queue_is(len(self._queue) > 0)

    def _fits(self, ticket: Ticket, room: Capacity) -> bool:
        if room.slots == 0 or self._running == 0:  # nobody connected: the flow says so; a giant must start some time
            return True
        running, free = ticket.account.running + ticket.choices, room.slots - self._running - ticket.choices
        if running > self._share(ticket.account, room.slots):
            if free < 0 or (ticket.account.caller.name and running > ticket.choices and running > _SHARE * free):
                return False
        elif free < (1 - _OVERFULL) * room.slots:
            return False
        return self._in_prefill == 0 or self._prefill_tokens + ticket.prompt_tokens <= room.prefill_tokens

    def _share(self, account: _Account, slots: int) -> float:
        """The slots that are a caller's own among those that want some; none where there is but one caller."""
        active = [other.caller.weight for other in self._accounts.values() if other.in_flight]
        return slots * account.caller.weight / sum(active) if len(active) > 1 else 0.0

    def _is_too_late(self, ticket: Ticket, now: float) -> bool:
        needed_s = self.expected_answer(ticket.max_tokens) * self._token_s
        return ticket.deadline is not None and ticket.enqueued < now and now + needed_s > ticket.deadline

    def _refuse(self, ticket: Ticket, entry: Entry) -> None:
        ticket.account.charge(-entry.cost)
        self._queue.correct(entry, 0.0)
        assert ticket.waiter is not None
        if not ticket.waiter.done():
            message = "the queue was slower than expected and the request would not end by its deadline; retry later"
            ticket.waiter.set_exception(Overloaded(message, self.retry_after_s))

    def _start(self, ticket: Ticket) -> None:
        ticket.running = ticket.in_prefill = True
        ticket.account.running += ticket.choices
        self._running += ticket.choices
        self._in_prefill += 1
        self._prefill_tokens += ticket.prompt_tokens
        assert ticket.waiter is not None
        if not ticket.waiter.done():
            ticket.waiter.set_result(None)

    def left_prefill(self, ticket: Ticket) -> None:
        """A ticket's prompt is computed; called by tickets."""
        ticket.in_prefill = False
        ticket.first_token_at = self._clock()
        self._in_prefill -= 1
        self._prefill_tokens -= ticket.prompt_tokens
        self.pump()

    @property
    def retry_after_s(self) -> float:
        """Seconds in which a place is likely to become free."""
        return _clamp(self._gap_s)

    def leave(self, ticket: Ticket, completion_tokens: int) -> None:
        """Takes a place back; called by tickets."""
        now = self._clock()
        if ticket.in_prefill:
            ticket.in_prefill = False
            self._in_prefill -= 1
            self._prefill_tokens -= ticket.prompt_tokens
        if ticket.entry is not None:
            self._settle(ticket, ticket.entry, completion_tokens, now)
        ticket.account.in_flight -= 1
        self.in_flight -= 1
        if self._last_end is not None:
            self._gap_s += _SMOOTHING * (now - self._last_end - self._gap_s)
        self._last_end = now
        if self.in_flight == 0:
            self._idle.set()
        self.pump()

    def _settle(self, ticket: Ticket, entry: Entry, completion_tokens: int, now: float) -> None:
        expected, cost = entry.cost, float(ticket.prompt_tokens + completion_tokens)
        if not ticket.running:
            self._queue.remove(entry)
            self._waiting.pop(id(entry), None)
            ticket.account.charge(-expected)
            return
        ticket.running = False
        ticket.account.running -= ticket.choices
        self._running -= ticket.choices
        ticket.account.charge(cost - expected)
        self._queue.correct(entry, cost)
        self._rate.served(cost)
        if completion_tokens:
            answer = completion_tokens / ticket.choices
            self._answer += _SMOOTHING * (answer - self._answer)
            if answer > 1 and ticket.first_token_at is not None:  # a long prompt says nothing of the answers' pace
                pace = (now - ticket.first_token_at) / (answer - 1)
                self._token_s += _SMOOTHING * (pace - self._token_s)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the router stops."""
        return self._draining

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until none is in flight; False when ``timeout_s`` was not enough."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _clamp(seconds: float) -> float:
    return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)
