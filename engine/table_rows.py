"""Block tables as rows of one array that outlives the step: a step writes only the ids that are new.

1. A request gets a row when it is first scheduled. ``Request.block_ids`` is append-only while the same list stays, so
   only its tail is copied; another list (after a preemption) is copied whole.
2. Rows of finished requests are given up now and then, and reused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinpool.engine.request import Request, RequestState

Int64 = npt.NDArray[np.int64]

_ROWS_BETWEEN_SWEEPS = 32


class ShortTable(Exception):
    """Row number ``index`` of a step has too few blocks."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class TableRows:
    """Used by one thread. Ids must be in ``[1, num_blocks)``."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rows: dict[Request, int] = {}
        self._sources: list[list[int]] = []
        self._lengths: list[int] = []
        self._unused: list[int] = []
        self._since_sweep = 0
        self._table = np.zeros((16, 16), np.int64)

    def __len__(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    def row(self, request: Request) -> int:
        """The request's row, up to date; valid for this step.

        Raises:
            ValueError: the request has a block id outside ``[1, num_blocks)``.
        """
        row = self._rows.get(request)
        block_ids = request.block_ids
        if row is None or self._sources[row] is not block_ids or self._lengths[row] != len(block_ids):
            return self._copy(request, row)
        return row

    def gather(self, rows: Sequence[int], counts: Int64) -> Int64:
        """The first ``counts[i]`` block ids of each row, zeros behind: ``[rows, most]``.

        Raises:
            ShortTable: a row has fewer.
        """
        lengths = self._lengths
        width = int(counts.max(initial=1))
        behind = np.arange(width) >= counts[:, None]
        short = counts > np.array([lengths[row] for row in rows], np.int64)
        if short.any():
            index = int(short.argmax())
            raise ShortTable(index, f"needs {counts[index]} blocks for its tokens and has {lengths[rows[index]]}")
        tables: Int64 = self._table[rows, :width]
        tables[behind] = 0
        return tables

    def _copy(self, request: Request, row: int | None) -> int:
        """Takes over new ids of a request, all of them if it has no row or another list than before."""
        block_ids = request.block_ids
        known = self._lengths[row] if row is not None and self._sources[row] is block_ids else 0
        new = np.array(block_ids[known:], np.int64)
        if new.size and (new.min() < 1 or new.max() >= self._num_blocks):
            raise ValueError(f"attempt {request.attempt_id:x} has a block id outside [1, {self._num_blocks})")
        if row is None:
            row = self._take(request)
        if len(block_ids) > self._table.shape[1]:
            self._grow(self._table.shape[0], len(block_ids))
        self._table[row, known : len(block_ids)] = new
        self._sources[row], self._lengths[row] = block_ids, len(block_ids)
        return row

    def _take(self, request: Request) -> int:
        self._since_sweep += 1
        if self._since_sweep >= _ROWS_BETWEEN_SWEEPS:
            self._since_sweep = 0
            for done in [r for r in self._rows if r.state is RequestState.FINISHED]:
                self._unused.append(self._rows.pop(done))
        if self._unused:
            row = self._unused.pop()
        else:
            row = len(self._sources)
            self._sources.append([])
            self._lengths.append(0)
            if row >= self._table.shape[0]:
                self._grow(row + 1, self._table.shape[1])
        self._rows[request] = row
        return row

    def _grow(self, rows: int, columns: int) -> None:
        old = self._table
        self._table = np.zeros((max(2 * rows, old.shape[0]), max(columns + columns // 2, old.shape[1])), np.int64)
        self._table[: old.shape[0], : old.shape[1]] = old
