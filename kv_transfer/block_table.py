"""A table that copies whole blocks, one by one: it keeps their ids, and its rows are made only where they are needed.

The nixl connector has the descriptors of all blocks prepared and needs the ids alone. They stay Python ints: a short
read is planned right after its thread slept, and then the first call into numpy alone takes 30 µs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinpool.kv_transfer.copy_table import HEADER, CopyRange, CopyTable, Rows


class BlockTable(CopyTable):
    """Block ``source[i]`` of the peer's region goes to block ``target[i]`` of ours; ``block_bytes`` is both strides."""

    __slots__ = ("block_bytes", "source", "target")

    def __init__(self, source: Sequence[int], target: Sequence[int], block_bytes: int) -> None:
        super().__init__(None)
        self.source = source
        self.target = target
        self.block_bytes = block_bytes

    @property
    def rows(self) -> Rows:
        """See ``CopyTable``; made at the first use."""
        if self._rows is None:
            rows = np.empty((len(self), 3), np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2] = self.source, self.target, 1
            rows *= self.block_bytes
            self._rows = rows
        return self._rows

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return len(self.source) * self.block_bytes

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.source)

    def outside(self, source_bytes: int, target_bytes: int) -> CopyRange | None:
        """See ``CopyTable``."""
        for ids, num_bytes in ((self.source, source_bytes), (self.target, target_bytes)):
            if min(ids, default=0) < 0 or max(ids, default=-1) >= num_bytes // self.block_bytes:
                return super().outside(source_bytes, target_bytes)
        return None

    def slices(self, max_bytes: int, max_ranges: int) -> list[CopyTable]:
        """See ``CopyTable``; of whole blocks, unless one block is too long."""
        step = min(max_bytes // self.block_bytes, max_ranges)
        if step == 0:
            return super().slices(max_bytes, max_ranges)
        if 0 < len(self) <= step:
            return [self]
        return [
            BlockTable(self.source[at : at + step], self.target[at : at + step], self.block_bytes)
            for at in range(0, len(self), step)
        ]

    def repeat(self, times: int) -> CopyTable:
        """See ``CopyTable``."""
        return BlockTable([*self.source] * times, [*self.target] * times, self.block_bytes)

    def encode(self) -> bytes:
        """Little-endian: ``HEADER`` with the bytes of a block, then all source and all target ids as int64."""
        return HEADER.pack(self.block_bytes) + np.array((self.source, self.target), "<i8").tobytes()


def decode_table(payload: bytes) -> CopyTable:
    """The inverse of ``encode`` of either class. ValueError if ``payload`` is none; its values are not checked."""
    width = 3
    if len(payload) >= HEADER.size:
        (block_bytes,) = HEADER.unpack_from(payload)
        width = 2 if block_bytes else 3
        if (len(payload) - HEADER.size) % (8 * width) == 0:
            numbers = np.frombuffer(payload, "<i8", offset=HEADER.size).astype(np.int64)
            if not block_bytes:
                return CopyTable(numbers.reshape(-1, 3))
            source, target = numbers.reshape(2, -1).tolist()
            return BlockTable(source, target, block_bytes)
    raise ValueError(f"{len(payload)} bytes are no table of ranges")
