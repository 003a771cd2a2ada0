"""Prefill side of the exchange, as the engine sees it: what is announced, and when. Ranks announce for themselves.

1. Admission: ``begin`` with all blocks of the prompt, then its prefix hits, all layers at once.
2. Each step: the blocks that became full; in the step that ends a prompt, all that remain, in layer groups, from
   inside the executor. The numbers are fixed at schedule time.
3. The first token: ``final`` (core). The hold table then decides who may read; the engine frees blocks only after
   ``final`` with nothing left to continue, ``revoke``, or HoldEnded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.engine.plan import OnLayers, StepPlan
from twinpool.engine.ports import KVExports, ReadyEvent, RolePolicy
from twinpool.engine.request import Request


class Written:
    """The event of KV that was written by an earlier step."""

    def query(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class Announcement:
    """Blocks of one request, from index ``first_block``, that this step completes."""

    transfer_id: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepAnnouncements:
    """What one step announces, in how many layer groups; ``on_layers`` is None if nothing."""

    layer_groups: int
    on_layers: OnLayers | None


class Exporter:
    """Announces KV of requests that the policy holds."""

    def __init__(
        self,
        exports: KVExports,
        policy: RolePolicy,
        rank_layers: Sequence[tuple[int, int]],
        block_size: int,
        layer_groups: int,
    ) -> None:
        self._exports = exports
        self._policy = policy
        self._rank_layers = tuple(rank_layers)
        self._block_size = block_size
        self._layer_groups = layer_groups

    def admitted(self, request: Request, num_hits: int) -> None:
        """The request owns its blocks; the first ``num_hits`` are written already."""
        if not self._policy.holds(request):
            return
        self._exports.begin(request.transfer_id, len(request.block_ids))
        if num_hits:
            hits = tuple(request.block_ids[:num_hits])
            for rank, (start, end) in enumerate(self._rank_layers):
                self._exports.announce(request.transfer_id, 0, hits, start, end, Written(), rank)

    def step(self, plan: StepPlan) -> StepAnnouncements:
        """Prepares the announcements of a step; must be called before the step is applied."""
        announcements: list[Announcement] = []
        groups = 1
        for entry in plan.scheduled:
            request = entry.request
            if not self._policy.holds(request):
                continue
            first = request.num_computed_tokens // self._block_size
            end = (request.num_computed_tokens + entry.num_tokens) // self._block_size
            if entry.samples:
                end = -(-request.num_tokens // self._block_size)
                groups = self._layer_groups
            if end > first:
                blocks = tuple(request.block_ids[first:end])
                announcements.append(Announcement(request.transfer_id, first, blocks))
        if not announcements:
            return StepAnnouncements(1, None)

        def on_layers(rank: int, start: int, end: int, event: ReadyEvent) -> None:
            for item in announcements:
                self._exports.announce(item.transfer_id, item.first_block, item.block_ids, start, end, event, rank)

        return StepAnnouncements(groups, on_layers)
