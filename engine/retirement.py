"""Launched steps that may still write, and the blocks that wait for them.

1. ``launch`` numbers a step; the requests in it carry the number (``Request.last_step``) and are in flight.
2. ``release`` takes a request's blocks: freed at once if no step in flight writes them, else kept until then.
3. ``retire``: no rank writes for the step any more; what waited for it is freed. Steps retire in order.

Copies for forks (``copy_later``) go with the next step and own a reference on both blocks until it has retired.
"""

from __future__ import annotations

from collections import Counter

from twinpool.engine.block_pool import BlockPool
from twinpool.engine.request import Request

Copy = tuple[int, int]
"""(source, target) block."""


class Retirement:
    """The only place that gives blocks of running requests back to ``pool``."""

    def __init__(self, pool: BlockPool) -> None:
        self.launched = 0
        """Number of the last launched step."""
        self.retired = 0
        """Number of the last step that no rank writes for any more."""
        self._pool = pool
        self._deferred: list[tuple[int, list[int]]] = []
        self._copies: list[Copy] = []
        self._copying: dict[int, list[Copy]] = {}

    def in_flight(self, request: Request) -> bool:
        """Whether a launched step that has not retired computes ``request``."""
        return request.last_step > self.retired

    def copy_later(self, copy: Copy) -> None:
        """The next step copies a block; takes over one reference on each of the two."""
        self._copies.append(copy)

    def drop_dead_copies(self) -> None:
        """Forgets copies whose target nobody owns any more."""
        alive = [copy for copy in self._copies if self._pool.references(copy[1]) > 1]
        for copy in self._copies:
            if copy not in alive:
                self._pool.free(copy)
        self._copies = alive

    def launch(self) -> tuple[int, list[Copy]]:
        """The next step's number and copies."""
        self.launched += 1
        copies, self._copies = self._copies, []
        self._copying[self.launched] = copies
        return self.launched, copies

    def release(self, request: Request) -> None:
        """Frees the request's blocks, now or when its last step retires."""
        blocks, request.block_ids = request.block_ids, []
        request.num_cached_blocks = 0
        if not blocks:
            return
        if self.in_flight(request):
            self._deferred.append((request.last_step, blocks))
        else:
            self._pool.free(blocks)

    def retire(self, step: int, failed: bool) -> None:
        """Ends ``step``. If it failed and none is in flight behind it, its copies are made again by the next one.

        (With others in flight they have been made: what breaks a copy then, breaks the worker.)
        """
        copies = self._copying.pop(step)
        again = failed and step == self.launched
        self.retired = step
        if again:
            self._copies = copies + self._copies
        else:
            for copy in copies:
                self._pool.free(copy)
        if self._deferred:
            for last_step, blocks in self._deferred:
                if last_step <= step:
                    self._pool.free(blocks)
            self._deferred = [item for item in self._deferred if item[0] > step]

    def owners(self) -> Counter[int]:
        """References per block that copies and deferred frees hold."""
        count: Counter[int] = Counter()
        for _, blocks in self._deferred:
            count.update(blocks)
        for copies in [self._copies, *self._copying.values()]:
            for copy in copies:
                count.update(copy)
        return count
