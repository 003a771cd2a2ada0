"""What a read copies: a table of ranges, made in one go, checked, cut and handed on without a Python object per range.

1. ``ReadPlanner`` makes it from blocks. Where nothing but whole blocks is copied it makes the subclass ``BlockTable``.
2. ``Link.read`` takes it; each connector checks it against both regions (``outside``) and may cut it (``slices``).
3. Between ranks of a worker it travels as bytes (``encode``, ``block_table.decode_table``).

Nobody changes a table once it is made: slices and halves may share its memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

HEADER = struct.Struct("<Q")
"""Bytes of a block, before the ids of a ``BlockTable``; 0 before rows."""


class CopyRange(NamedTuple):
    """Copies ``length`` bytes from offset ``source`` of the peer's region to offset ``target`` of ours."""

    source: int
    target: int
    length: int


class CopyTable:
    """Ranges as rows of int64 ``[n, 3]``: source offset, target offset, length, in bytes.

    Signed, so that a negative offset is seen as such when it is checked.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Rows | None) -> None:
        self._rows = rows

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, int]]) -> CopyTable:
        """A table of a few ranges, (source, target, length) each."""
        return CopyTable(np.array(list(ranges), np.int64).reshape(-1, 3))

    @property
    def rows(self) -> Rows:
        """The ranges, ``[n, 3]``; not to be written to."""
        assert self._rows is not None
        return self._rows

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return int(self.rows[:, 2].sum())

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self.rows)

    def __iter__(self) -> Iterator[CopyRange]:
        """The ranges one by one: for messages and for connectors that copy them one by one."""
        return (CopyRange(*row) for row in self.rows.tolist())

    def outside(self, source_bytes: int, target_bytes: int) -> CopyRange | None:
        """The first range that is empty or leaves regions of these sizes."""
        rows = self.rows
        lengths = rows[:, 2:]
        # Not offset + length, which may overflow.
        bad = (rows[:, :2] < 0) | (lengths <= 0) | (rows[:, :2] > np.array((source_bytes, target_bytes)) - lengths)
        return next(iter(CopyTable(rows[bad.any(axis=1)])), None) if bad.any() else None

    def slices(self, max_bytes: int, max_ranges: int) -> list[CopyTable]:
        """Cuts into tables of at most ``max_bytes`` and ``max_ranges``, dividing ranges that are too long."""
        rows = self.rows
        ends = np.cumsum(rows[:, 2])
        total = int(ends[-1]) if len(rows) else 0
        if total <= max_bytes and len(rows) <= max_ranges:
            return [self] if total else []
        parts: list[CopyTable] = []
        done = first = 0
        while done < total:
            # The last range of this slice: the one that reaches its end, or as many as may be in it.
            last = min(int(np.searchsorted(ends, done + max_bytes)), first + max_ranges - 1, len(rows) - 1)
            last_end = int(ends[last])
            part = rows[first : last + 1].copy()
            begun = done - int(ends[first] - rows[first, 2])
            part[0] += (begun, begun, -begun)
            over = max(0, last_end - done - max_bytes)
            part[-1, 2] -= over
            parts.append(CopyTable(part))
            done = last_end - over
            first = last if over else last + 1
        return parts

    def repeat(self, times: int) -> CopyTable:
        """The same ranges, again and again."""
        return CopyTable(np.tile(self.rows, (times, 1)))

    def encode(self) -> bytes:
        """Little-endian: ``HEADER`` with 0, then the rows as int64."""
        return HEADER.pack(0) + self.rows.astype("<i8").tobytes()


def joined(tables: list[CopyTable]) -> CopyTable:
    """All ranges of ``tables``, in order; at least one table."""
    return tables[0] if len(tables) == 1 else CopyTable(cast(Rows, np.concatenate([table.rows for table in tables])))
