"""The router's one admission budget.

A request holds a ``Ticket`` from the moment it is accepted to the moment its end is known; the flow releases it. Over
the budget, or while draining, requests are refused before anything is tokenised or sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from twinpool.errors import Overloaded, Unavailable

_SMOOTHING = 0.1
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 10.0


class Ticket:
    """A place in the budget; released once."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        """Gives the place back. Idempotent."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.leave()


class Admission:
    """Counts requests in flight and refuses what exceeds ``limit``."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_end: float | None = None
        self._gap_s = 1.0
        self.in_flight = 0

    def admit(self) -> Ticket:
        """Takes one place.

        Raises:
            Unavailable: the router drains.
            Overloaded: the budget is used up; the retry delay follows the recent pace of completions.
        """
        if self._draining:
            raise Unavailable("the router is shutting down; send the request to another one")
        if self.in_flight >= self._limit:
            raise Overloaded(
                f"{self.in_flight} requests are in flight and router.max_queued is {self._limit}; retry later",
                self.retry_after_s,
            )
        self.in_flight += 1
        self._idle.clear()
        return Ticket(self)

    @property
    def retry_after_s(self) -> float:
        """Seconds in which a place is likely to become free."""
        return min(max(self._gap_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def leave(self) -> None:
        """Takes a place back; called by tickets."""
        self.in_flight -= 1
        now = self._clock()
        if self._last_end is not None:
            self._gap_s += _SMOOTHING * (now - self._last_end - self._gap_s)
        self._last_end = now
        if self.in_flight == 0:
            self._idle.set()

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
