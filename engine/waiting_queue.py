"""Requests that wait for admission, in the order in which they are admitted."""

from __future__ import annotations

from bisect import bisect_left, insort

from twinpool.engine.request import Request

_Key = tuple[bool, int, int, int]


def rank(request: Request) -> tuple[int, int, int]:
    """Smaller is served first and preempted last: priority, then order of submission, then choice."""
    return (request.priority, request.sequence, request.choice)


class WaitingQueue:
    """Resumed requests first, then by ``rank``; with equal priorities that is first come, first served.

    ``num_tokens`` is the sum of the ``work`` of all that wait: tokens to be computed here.
    """

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._requests: dict[_Key, Request] = {}
        self._key_of: dict[Request, _Key] = {}
        self._work: dict[Request, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, request: Request, resumed: bool, work: int) -> None:
        """Adds a request; ``resumed`` ones (preempted, or without room to start beside its siblings) go first."""
        key = (not resumed, *rank(request))
        insort(self._keys, key)
        self._requests[key] = request
        self._key_of[request] = key
        self._work[request] = work
        self.num_tokens += work

    def head(self) -> Request:
        """The next to be admitted; the queue must not be empty."""
        return self._requests[self._keys[0]]

    def remove(self, request: Request) -> None:
        """Takes a request out.

        Raises:
            KeyError: it is not here.
        """
        key = self._key_of.pop(request)
        self.num_tokens -= self._work.pop(request)
        del self._requests[key]
        del self._keys[bisect_left(self._keys, key)]
