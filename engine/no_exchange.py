"""Exchange ports of an engine that serves alone: nothing is ever exported or imported, so nothing is done."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.engine.commands import FirstToken
from twinpool.engine.ports import ReadyEvent


class NoExports:
    """A ``KVExports`` for an engine whose policy holds nothing."""

    def begin(self, transfer_id: int, num_blocks: int) -> None:
        """Nothing to do."""

    def announce(
        self,
        transfer_id: int,
        first_block: int,
        block_ids: Sequence[int],
        layer_start: int,
        layer_end: int,
        event: ReadyEvent,
        rank: int,
    ) -> None:
        """Nothing to do."""

    def final(self, transfer_id: int, num_tokens: int, first_tokens: Sequence[FirstToken]) -> None:
        """Nothing to do."""

    def refuse(self, transfer_id: int, reason: str) -> None:
        """Nothing to do."""

    def revoke(self, transfer_id: int, reason: str) -> None:
        """Nothing to do."""


class NoImports:
    """A ``KVImports`` for an engine whose policy loads nothing."""

    def reserved(self, transfer_id: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def abandon(self, transfer_id: int) -> None:
        """Nothing to do."""
