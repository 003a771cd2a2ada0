"""KV block ids: who may use which, and which still hold a known prefix.

Life cycle of a block:

1. Free without a hash, at its place in the free list.
2. ``allocate`` takes it from the head (least recently freed); if it had a hash, that is forgotten first.
3. ``cache`` names it once it is full and its KV is real. A hash names one block; a second block with the same
   content stays unnamed (block tables are append-only, so a request keeps the block it wrote).
4. ``touch`` adds an owner, and revives a free block that still has its hash.
5. ``free`` takes an owner away; the last one returns the block to the tail of the free list, hash and all. Tables
   are freed in reverse, so that of one request the deepest block, the least useful prefix, is reused first.

Free list and prefix cache are one structure: an intrusive doubly linked LRU list in arrays, with block 0, the null
block that padding writes to, as its sentinel. Not thread-safe: the engine thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
_NOT_FREE = -1


class IntegrityError(Exception):
    """The books do not balance; the engine must not go on."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Net change of the cached hashes since the last ``take_events``; ``stored`` has parents first."""

    reset: bool
    stored: list[bytes]
    removed: list[bytes]


class BlockPool:
    """``num_blocks`` blocks, the null block included; ``num_blocks - 1`` are usable."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs 2 blocks or more (one is the null block), not {num_blocks}")
        self._num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_free = num_blocks - 1
        self._cached: dict[bytes, int] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._reset = False

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that have a hash."""
        return len(self._cached)

    def references(self, block_id: int) -> int:
        """Owners of a block."""
        return self._refs[block_id]

    def free_ids(self) -> list[int]:
        """The free list, next to be allocated first. O(free blocks); for tests and checks."""
        ids: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(ids) < self._num_blocks:
            ids.append(block)
            block = self._next[block]
        return ids

    def lookup(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of ``hashes``, at most ``limit``. Changes nothing."""
        found: list[int] = []
        for block_hash in hashes[:limit]:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, count: int, hits: Sequence[int] = (), headroom: int = 0) -> bool:
        """Whether ``count`` blocks remain beside ``headroom`` after ``hits`` are touched. Changes nothing."""
        revived = sum(1 for block in hits if self._refs[block] == 0)
        return count + revived + headroom <= self._num_free

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds an owner to each block; free ones (cache hits) leave the free list."""
        for block in block_ids:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks from the head of the free list, each with one owner.

        Raises:
            IntegrityError: fewer are free; callers ask ``can_allocate`` first.
        """
        if count > self._num_free:
            raise IntegrityError(f"{count} blocks asked for, {self._num_free} free")
        taken: list[int] = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes one owner from each block, last block first.

        Raises:
            IntegrityError: a block has no owner, or is the null block.
        """
        for block in reversed(block_ids):
            if self._refs[block] <= 0 or block == NULL_BLOCK:
                raise IntegrityError(f"block {block} freed without an owner")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._append(block)

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Names a full block whose KV is written. Does nothing if the hash or the block is named already."""
        if block_hash in self._cached or self._hashes[block_id] is not None:
            return
        self._cached[block_hash] = block_id
        self._hashes[block_id] = block_hash
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def reset_cache(self) -> None:
        """Forgets the hashes of all blocks without owners; blocks in use keep theirs."""
        for block in self.free_ids():
            self._forget(block)
        self._reset = True
        self._removed.clear()
        self._stored = dict.fromkeys(self._cached)

    def take_events(self) -> CacheEvents:
        """Hands over and clears the changes since the last call."""
        events = CacheEvents(self._reset, list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        self._reset = False
        return events

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Compares the pool with ``owners``: references per block as the owners count them.

        Raises:
            IntegrityError: the first difference found.
        """
        free = self.free_ids()
        if len(free) != self._num_free or len(set(free)) != len(free):
            raise IntegrityError(f"free list holds {len(set(free))} blocks, the count says {self._num_free}")
        is_free = set(free)
        for block in range(1, self._num_blocks):
            refs = self._refs[block]
            if refs != owners.get(block, 0):
                raise IntegrityError(f"block {block} has {refs} references, its owners count {owners.get(block, 0)}")
            if (refs == 0) != (block in is_free):
                raise IntegrityError(f"block {block} with {refs} references is {'' if refs else 'not '}free")
            block_hash = self._hashes[block]
            if block_hash is not None and self._cached.get(block_hash) != block:
                raise IntegrityError(f"block {block} carries a hash that names block {self._cached.get(block_hash)}")
        if self._refs[NULL_BLOCK] or owners.get(NULL_BLOCK) or self._hashes[NULL_BLOCK] is not None:
            raise IntegrityError("the null block is owned or cached")
        if len(self._cached) != sum(1 for block_hash in self._hashes if block_hash is not None):
            raise IntegrityError("the cache names blocks that do not carry its hashes")

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._hashes[block] = None
        del self._cached[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _NOT_FREE
        self._num_free -= 1

    def _append(self, block: int) -> None:
        last = self._prev[NULL_BLOCK]
        self._next[last] = block
        self._prev[block] = last
        self._next[block] = NULL_BLOCK
        self._prev[NULL_BLOCK] = block
        self._num_free += 1
