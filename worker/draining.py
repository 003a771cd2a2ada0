"""Whether a worker takes new attempts, and why not: an operator's order, or the end of the process.

1. ``order`` (an operator, over a session) starts draining or takes it back; what still runs after ``hand_over_s`` is
   handed over to other workers. The process stays, and serves the KV that it has promised.
2. ``end`` (SIGTERM) starts draining for good: nobody takes that back.
3. Routers hear of it with the next report and send nothing more. What they have sent before that is still taken:
   its first token may be with the client already, and no other worker of the revision may be left.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twinpool.errors import Unavailable


class Draining:
    """See the module docstring. ``hand_over`` ends unfinished attempts with DRAINING."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, worker_id: str, report_interval_s: float, hand_over: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._grace_s = 2 * report_interval_s
        self._since = 0.0
        self._worker_id = worker_id
        self._hand_over = hand_over
        self._timer: asyncio.TimerHandle | None = None
        self._ends = False
        self.active = False
        """Whether routers are told to send no more."""

    @property
    def refuses(self) -> bool:
        """Whether routers must know by now, so that new attempts are refused."""
        return self.active and self._loop.time() - self._since >= self._grace_s

    @property
    def reason(self) -> str:
        """What refused attempts are told."""
        return f"{self._worker_id} is draining"

    def order(self, enabled: bool, hand_over_s: float | None) -> None:
        """Starts or takes back draining; ``hand_over_s`` None lets running attempts end here.

        Raises:
            Unavailable: it cannot be taken back, because the process is about to end.
        """
        if self._ends:
            if enabled:
                return
            raise Unavailable(f"{self._worker_id} is shutting down; start another worker")
        self._stop_timer()
        if enabled and not self.active:
            self._since = self._loop.time()
        self.active = enabled
        if enabled and hand_over_s is not None:
            self._timer = self._loop.call_later(hand_over_s, self._hand_over)

    def end(self) -> None:
        """The process is about to end; whoever ends it says when to hand over."""
        self._stop_timer()
        if not self.active:
            self._since = self._loop.time()
        self._ends = self.active = True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
