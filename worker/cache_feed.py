"""What routers are told of the prefix cache: net changes, in messages bounded in size and rate.

1. ``open`` (a session starts): the new session is owed all that is cached, so that a router knows a worker which is
   older than itself.
2. ``apply`` (an engine step changed the cache): each session's debt changes. What was stored and evicted again before
   it was told cancels out, so a debt never exceeds the blocks of the worker.
3. While debts are left, a timer sends at most one message per session and interval, and none to a session that has
   not sent its earlier data yet: a slow router costs memory per block, not per event.
4. ``close`` (the session ends) drops the debt.

Event loop only. Blocks go by the short names of ``twinpool.block_hash``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from twinpool.block_hash import short_name
from twinpool.proto import worker_pb2
from twinpool.rpc import Outbox

NAMES_PER_MESSAGE = 4096
"""At 8 bytes each, a message stays under 64 KiB."""
INTERVAL_S = 0.05


@dataclass(slots=True)
class _Debt:
    """What a session has not been told yet; ordered, parents first."""

    outbox: Outbox[worker_pb2.SessionResponse]
    reset: bool = True
    stored: dict[int, None] = field(default_factory=dict)
    removed: dict[int, None] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self.reset or self.stored or self.removed)

    def add(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        for name in removed:
            if name in self.stored:
                del self.stored[name]
            else:
                self.removed[name] = None
        for name in stored:
            if name in self.removed:
                del self.removed[name]
            else:
                self.stored[name] = None

    def restart(self, held: Iterable[int]) -> None:
        self.reset, self.stored, self.removed = True, dict.fromkeys(held), {}

    def take(self) -> worker_pb2.CacheEvents:
        """The next message; evictions first, because they may make room in the router's index."""
        removed = list(islice(self.removed, NAMES_PER_MESSAGE))
        stored = list(islice(self.stored, NAMES_PER_MESSAGE - len(removed)))
        message = worker_pb2.CacheEvents(reset=self.reset, stored=stored, removed=removed)
        self.reset = False
        for name in removed:
            del self.removed[name]
        for name in stored:
            del self.stored[name]
        return message


class CacheFeed:
    """See the module docstring."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = INTERVAL_S) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._held: dict[int, None] = {}
        self._debts: dict[int, _Debt] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, origin: int, outbox: Outbox[worker_pb2.SessionResponse]) -> None:
        """A session starts; it is told everything."""
        self._debts[origin] = debt = _Debt(outbox)
        debt.restart(self._held)
        self._schedule()

    def close(self, origin: int) -> None:
        """A session has ended."""
        del self._debts[origin]

    def apply(self, reset: bool, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The cache changed; ``reset`` says that ``stored`` is all that it holds. Hashes, parents first."""
        new, gone = [short_name(item) for item in stored], [short_name(item) for item in removed]
        if reset:
            self._held = dict.fromkeys(new)
        else:
            for name in gone:
                self._held.pop(name, None)
            self._held.update(dict.fromkeys(new))
        for debt in self._debts.values():
            if reset:
                debt.restart(self._held)
            else:
                debt.add(new, gone)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and any(debt.is_open for debt in self._debts.values()):
            self._timer = self._loop.call_later(self._interval_s, self._send)

    def _send(self) -> None:
        self._timer = None
        for debt in self._debts.values():
            if debt.is_open and debt.outbox.last_data is None:
                debt.outbox.put(worker_pb2.SessionResponse(cache=debt.take()))
        self._schedule()
