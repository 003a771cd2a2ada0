"""When a call whose caller has seen nothing yet is sent again: only for UNAVAILABLE, a few times, in time."""

from __future__ import annotations

import random
import time

from twinpool.errors import TwinpoolError, Unavailable

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 2.0


class Retries:
    """The retries of one call; made when the call starts.

    Args:
        limit: most retries.
        timeout: seconds for the call with all its retries; None sets no limit.
    """

    def __init__(self, limit: int, timeout: float | None) -> None:
        self._left = limit
        self._delay_s = FIRST_DELAY_S
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def time_left(self) -> float | None:
        """Seconds until the deadline, at least a little so that the server can answer; None without a deadline."""
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def next_delay(self, error: TwinpoolError) -> float | None:
        """Seconds to wait before sending again, jittered; None gives up. Uses up one retry."""
        left_s = self.time_left()
        delay_s = self._delay_s * random.uniform(0.75, 1.25)
        if not isinstance(error, Unavailable) or self._left == 0 or (left_s is not None and left_s <= delay_s):
            return None
        self._left -= 1
        self._delay_s = min(MAX_DELAY_S, self._delay_s * 2)
        return delay_s
