"""The names that workers give to the blocks of a request, computed by the same hash chain."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.block_hash import chain_hashes, chain_root, short_name
from twinpool.router.messages import WorkerInfo


class PromptBlocks:
    """Names of the full blocks of one request's tokens, per (revision, block size), each computed once."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str) -> None:
        self._token_ids = token_ids
        self._salt = cache_salt
        self._names: dict[tuple[str, int], list[int]] = {}

    def of(self, info: WorkerInfo) -> list[int]:
        """Names as ``info``'s worker computes them, first block first; about 1 us per block at the first call."""
        key = info.revision, info.block_size
        names = self._names.get(key)
        if names is None:
            hashes = chain_hashes(chain_root(info.revision, "", self._salt), self._token_ids, max(info.block_size, 1))
            names = self._names[key] = [short_name(block_hash) for block_hash in hashes]
        return names
