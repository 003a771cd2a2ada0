"""What one router has given a worker since the worker's last report, less what has ended since.

Reports come every few hundred milliseconds; in between the router knows more than they say. 1. ``sent`` counts an
attempt. 2. ``computed`` takes its tokens off the queue, ``ended`` the attempt itself. 3. ``reported`` starts anew: the
report speaks for all that was before. What ends later than the report is still taken off, so numbers may be negative.
"""

from __future__ import annotations


class Backlog:
    """Counts of one session."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.kv_tokens = 0
        self._open: dict[int, tuple[int, int]] = {}

    def sent(self, attempt_id: int, requests: int, tokens: int, kv_tokens: int) -> None:
        """An attempt was sent: ``tokens`` to compute there, ``kv_tokens`` to find room for."""
        self._open[attempt_id] = requests, tokens
        self.requests += requests
        self.tokens += tokens
        self.kv_tokens += kv_tokens

    def computed(self, attempt_id: int) -> None:
        """Its first token is out. Idempotent."""
        requests, tokens = self._open.get(attempt_id, (0, 0))
        if tokens:
            self._open[attempt_id] = requests, 0
            self.tokens -= tokens

    def ended(self, attempt_id: int) -> None:
        """It is over there. Idempotent."""
        requests, tokens = self._open.pop(attempt_id, (0, 0))
        self.requests -= requests
        self.tokens -= tokens

    def reported(self) -> None:
        """A report came."""
        self.requests = self.tokens = self.kv_tokens = 0
