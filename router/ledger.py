"""What has gone wrong with one request so far, and what follows: go on, after how long, where not, or give up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from twinpool.errors import TwinpoolError, Unavailable
from twinpool.router.policy import WorkerKey

MAX_CRASHES = 3
_MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 2.0


class Ledger:
    """Counts per choice, so that the loss of one worker weighs the same whatever ``n`` is."""

    def __init__(self, max_attempts: int) -> None:
        self.avoid: set[WorkerKey] = set()
        """Workers that failed this request: used when no other is left."""
        self.exhausted: set[WorkerKey] = set()
        """Workers that had no room: not asked again before the answer has started."""
        self.redispatches = 0
        self._max_attempts = max_attempts
        self._attempts: Counter[int] = Counter()
        self._crashes: Counter[int] = Counter()

    def submitted(self, choices: Sequence[int]) -> None:
        """An attempt was sent for ``choices``."""
        self._attempts.update(choices)

    def crashed(self, choices: Sequence[int]) -> None:
        """A worker failed while it ran ``choices``."""
        self._crashes.update(choices)

    def verdict(self, choices: Sequence[int], reason: str) -> TwinpoolError | None:
        """Why ``choices`` must not be tried again, or None."""
        if any(self._crashes[choice] >= MAX_CRASHES for choice in choices):
            return TwinpoolError(
                f"{MAX_CRASHES} workers failed while they ran this request, so it is not tried again; last: {reason}"
            )
        attempts = max(self._attempts[choice] for choice in choices)
        if attempts >= self._max_attempts:
            return Unavailable(f"gave up after {attempts} attempts (router.max_attempts); last: {reason}")
        return None

    def pause_s(self, choices: Sequence[int]) -> float:
        """Jittered seconds before the next attempt; doubles with each."""
        attempts = max(self._attempts[choice] for choice in choices)
        longest: float = min(_MIN_PAUSE_S * 2 ** min(attempts - 1, 10), MAX_PAUSE_S)
        return longest * random.uniform(0.5, 1.0)
