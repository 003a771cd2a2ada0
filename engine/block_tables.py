"""Block tables of requests over the block pool: match, ask, allocate, fork, commit.

A request's table (``Request.block_ids``) is append-only while it lives:

1. ``match`` finds the cached prefix; it changes nothing, so that a refused admission leaves no trace.
2. ``can_allocate`` asks, ``allocate`` acts: hits are referenced first, so that the new blocks cannot evict them.
3. ``commit`` names full blocks once their KV is written.
4. ``fork`` shares the full blocks of a computed prompt with another choice and gives it a block of its own for
   the partial rest, to be copied by the next step.
5. The scheduler takes the table away and frees it when no launched step writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.block_hash import chain_hashes, chain_root
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.request import Request


class BlockTables:
    """The request side of one ``BlockPool``; ``revision`` and the request's salt start its hash chain."""

    def __init__(self, pool: BlockPool, block_size: int, revision: str, caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self._revision = revision
        self._caching = caching

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request, limit: int) -> list[int]:
        """Blocks of the longest cached prefix, at most ``limit``; only extends the request's hash chain."""
        if not self._caching or limit <= 0:
            return []
        self._extend_hashes(request)
        return self.pool.lookup(request.block_hashes, limit)

    def can_allocate(self, request: Request, num_tokens: int, hits: Sequence[int] = (), headroom: int = 0) -> bool:
        """Whether the table can grow to ``num_tokens`` tokens and leave ``headroom`` blocks free."""
        count = self.blocks_for(num_tokens) - len(request.block_ids) - len(hits)
        return (count <= 0 and not hits) or self.pool.can_allocate(max(count, 0), hits, headroom)

    def admit(self, request: Request, num_tokens: int, hits: Sequence[int]) -> None:
        """Gives an empty table ``hits`` and new blocks up to ``num_tokens``; hit tokens count as computed."""
        self.pool.touch(hits)
        request.block_ids = [*hits, *self.pool.allocate(self.blocks_for(num_tokens) - len(hits))]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_cached_blocks = len(hits)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Appends blocks until ``num_tokens`` tokens fit."""
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count > 0:
            request.block_ids += self.pool.allocate(count)

    def commit(self, request: Request) -> None:
        """Offers full blocks of computed tokens to the prefix cache. Drafts are never in: only known tokens count."""
        if not self._caching or request.num_computed_tokens < (request.num_cached_blocks + 1) * self.block_size:
            return
        full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if full <= request.num_cached_blocks:
            return
        self._extend_hashes(request)
        for index in range(request.num_cached_blocks, full):
            self.pool.cache(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = full

    def can_fork(self, num_tokens: int) -> bool:
        """Whether a choice can share ``num_tokens`` computed tokens."""
        return num_tokens % self.block_size == 0 or self.pool.can_allocate(1)

    def fork(self, source: Request, target: Request, num_tokens: int) -> tuple[int, int] | None:
        """Shares ``num_tokens`` computed tokens of ``source`` with ``target``, whose table is empty.

        Returns:
            (source, target) of the partial block to copy, each with one reference more, for the copy's own sake;
            None if ``num_tokens`` ends on a block edge.
        """
        full = num_tokens // self.block_size
        shared = source.block_ids[:full]
        self.pool.touch(shared)
        target.block_ids = list(shared)
        target.block_hashes = source.block_hashes[:full]
        target.num_cached_blocks = min(source.num_cached_blocks, full)
        target.num_computed_tokens = num_tokens
        if num_tokens % self.block_size == 0:
            return None
        target.block_ids += self.pool.allocate(1)
        copy = (source.block_ids[full], target.block_ids[full])
        self.pool.touch(copy)
        return copy

    def _extend_hashes(self, request: Request) -> None:
        known = len(request.block_hashes)
        if request.num_tokens // self.block_size <= known:
            return
        parent = request.block_hashes[-1] if known else chain_root(self._revision, "", request.cache_salt)
        tokens = request.tokens(known * self.block_size, request.num_tokens)
        request.block_hashes += chain_hashes(parent, tokens, self.block_size)
