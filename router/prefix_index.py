"""Which blocks a worker's prefix cache is believed to hold: what cache events said, and what is on its way there.

1. ``apply`` takes the worker's events. ``reset`` forgets all that was said before.
2. ``expect`` notes the blocks of a request that was just sent: they will be cached, but their events come later, and
   the next turn or a twin of the request may come sooner. They count until their event, or until they expire.
3. ``matched`` says how much of a prompt is believed to be cached.

An index belongs to one session with one worker process and ends with it: a restarted worker begins with an empty one.
It is a hint: a wrong guess costs computation, never a wrong answer. Memory is bounded by ``capacity`` names of each
kind; beyond that the oldest go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_CAPACITY = 1 << 17


class PrefixIndex:
    """Names are those of ``twinpool.block_hash.short_name``; times are seconds of one monotonic clock."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: blocks of the worker, which cannot cache more."""
        self._capacity = max(1, min(capacity, MAX_CAPACITY))
        self._known: dict[int, None] = {}
        self._expected: dict[int, float] = {}
        self._caches = False

    @property
    def num_known(self) -> int:
        """Blocks that the worker has said to cache."""
        return len(self._known)

    def apply(self, reset: bool, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Takes one message of events."""
        if reset:
            self._known.clear()
        for name in removed:
            self._known.pop(name, None)
        for name in stored:
            self._caches = True
            self._expected.pop(name, None)
            self._known[name] = None
        _trim(self._known, self._capacity)

    def expect(self, names: Iterable[int], expires: float) -> None:
        """Notes blocks that a request sent now will leave there.

        A worker that never stored anything may have prefix caching off; nothing is expected of it.
        """
        if not self._caches:
            return
        for name in names:
            if name not in self._known:
                self._expected.pop(name, None)  # renewed ones count as the newest
                self._expected[name] = expires
        _trim(self._expected, self._capacity)

    def matched(self, names: Sequence[int], now: float) -> int:
        """Leading blocks of a prompt that are believed to be cached; ``names`` in order. O(log n).

        Caches drop the deepest block of a prefix first, so a cached block's parents are taken to be cached too.
        """
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if self._holds(names[middle], now):
                low = middle + 1
            else:
                high = middle
        return low

    def _holds(self, name: int, now: float) -> bool:
        if name in self._known:
            return True
        expires = self._expected.get(name)
        if expires is None:
            return False
        if expires <= now:
            del self._expected[name]
            return False
        return True


def _trim(names: dict[int, None] | dict[int, float], capacity: int) -> None:
    while len(names) > capacity:
        del names[next(iter(names))]
