"""What is derived from a request and kept between steps only to save time.

Everything here can be rebuilt from the request, so losing an entry costs time and nothing else: an entry is made on
first use, dropped once its request has finished or when more than ``capacity`` others were used since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from twinpool.engine.request import Request, RequestState

T = TypeVar("T")


class PerRequest(Generic[T]):
    """A bounded cache of one ``T`` per live request, by identity of the request object."""

    def __init__(self, make: Callable[[Request], T], capacity: int = 512) -> None:
        self._make = make
        self._capacity = capacity
        self._entries: OrderedDict[int, tuple[Request, T]] = OrderedDict()
        self._inserts = 0

    def get(self, request: Request) -> T:
        """The request's entry, made if need be. Holding the request keeps its identity from being reused."""
        key = id(request)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry[1]
        self._evict()
        value = self._make(request)
        self._entries[key] = (request, value)
        return value

    def __len__(self) -> int:
        return len(self._entries)

    def _evict(self) -> None:
        self._inserts += 1
        if self._inserts >= 16:
            self._inserts = 0
            for key in [k for k, (r, _) in self._entries.items() if r.state is RequestState.FINISHED]:
                del self._entries[key]
        while len(self._entries) >= self._capacity:
            self._entries.popitem(last=False)
