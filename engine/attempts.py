"""Live attempts of one engine: found by id, exchange or session, and ended from any state.

An attempt is one request, or several choices of it once the prompt is computed. It leaves the table when its last
choice ends. How blocks come back depends on the state it ends in:

- WAITING: it has none. Prefill refuses its exchange, decode abandons it.
- LOADING: a read may still land in them. Decode abandons the exchange; they stay in quarantine until DestinationSafe
  (or RemoteLoaded, if that was under way), and only then are freed.
- RUNNING, HELD: freed when the last launched step that writes them has retired; a promise is revoked first.
"""

from __future__ import annotations

import heapq
from collections import Counter

from twinpool.engine.ports import Grammars, KVExports, KVImports, RolePolicy
from twinpool.engine.request import Request, RequestState
from twinpool.engine.scheduler import Scheduler


class Attempts:
    """The table. ``exchange_ended`` below means that the exchange itself brought the news: it is not told back."""

    def __init__(
        self,
        scheduler: Scheduler,
        policy: RolePolicy,
        exports: KVExports,
        imports: KVImports,
        grammars: Grammars | None,
    ) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._exports = exports
        self._imports = imports
        self._grammars = grammars
        self._choices: dict[int, list[Request]] = {}
        self._transfers: dict[int, Request] = {}
        self._quarantine: dict[int, list[int]] = {}
        self._safe: set[int] = set()
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, attempt_id: int) -> bool:
        return attempt_id in self._choices

    def has_transfer(self, transfer_id: int) -> bool:
        """Whether an exchange is in use, or its destination in quarantine."""
        return transfer_id in self._transfers or transfer_id in self._quarantine

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks kept because a read may still land."""
        return sum(len(blocks) for blocks in self._quarantine.values())

    def add(self, request: Request) -> None:
        """A new attempt, or another choice of a live one."""
        choices = self._choices.setdefault(request.attempt_id, [])
        if not choices and request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.attempt_id))
        if not choices and request.transfer_id:
            self._transfers[request.transfer_id] = request
        choices.append(request)

    def root(self, attempt_id: int) -> Request | None:
        """The first live choice."""
        choices = self._choices.get(attempt_id)
        return choices[0] if choices else None

    def by_transfer(self, transfer_id: int) -> Request | None:
        """The request whose exchange is open."""
        return self._transfers.get(transfer_id)

    def of_origin(self, origin: int) -> list[int]:
        """Ids of a session's attempts."""
        return [attempt_id for attempt_id, choices in self._choices.items() if choices[0].origin == origin]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live attempt."""
        while self._deadlines and self._deadlines[0][1] not in self._choices:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> list[int]:
        """Takes the ids of live attempts whose deadline is over."""
        ids: list[int] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            ids.append(heapq.heappop(self._deadlines)[1])
        return ids

    def transfer_confirmed(self, transfer_id: int) -> None:
        """The copy is ours: nothing of the exchange is left to end."""
        self._transfers.pop(transfer_id, None)

    def finish(self, request: Request, now: float) -> None:
        """One choice ended as it should; its blocks are freed."""
        self._drop(request, now)

    def abort(self, attempt_id: int, reason: str, now: float, exchange_ended: bool = False) -> None:
        """Ends all choices of an attempt, in whatever state. Unknown ids are ignored."""
        for request in list(self._choices.get(attempt_id, ())):
            if not exchange_ended and self._transfers.get(request.transfer_id) is request:
                self._end_exchange(request, reason)
            self._drop(request, now)

    def destination_safe(self, transfer_id: int) -> None:
        """No read can land any more: quarantined blocks are freed, now or as soon as their request has ended."""
        blocks = self._quarantine.pop(transfer_id, None)
        if blocks is not None:
            self._scheduler.tables.pool.free(blocks)
        elif transfer_id in self._scheduler.loading:
            self._safe.add(transfer_id)

    def owners(self) -> Counter[int]:
        """References per block that quarantine holds."""
        count: Counter[int] = Counter()
        for blocks in self._quarantine.values():
            count.update(blocks)
        return count

    def _end_exchange(self, request: Request, reason: str) -> None:
        if self._policy.loads(request):
            self._imports.abandon(request.transfer_id)
        elif self._policy.holds(request):
            if request.state is RequestState.WAITING:
                self._exports.refuse(request.transfer_id, reason)
            else:
                self._exports.revoke(request.transfer_id, reason)

    def _drop(self, request: Request, now: float) -> None:
        blocks = self._scheduler.discard(request, now)
        if blocks and request.transfer_id in self._safe:
            self._scheduler.tables.pool.free(blocks)
        elif blocks:
            self._quarantine[request.transfer_id] = blocks
        self._safe.discard(request.transfer_id)
        if self._grammars is not None and request.constraint is not None:
            self._grammars.release(request)
        if self._transfers.get(request.transfer_id) is request:
            del self._transfers[request.transfer_id]
        choices = self._choices[request.attempt_id]
        choices.remove(request)
        if not choices:
            del self._choices[request.attempt_id]
