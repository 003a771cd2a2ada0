"""Which bytes to copy between two ranks of any tensor- and pipeline-parallel shapes of one layout.

A planner is made once per pair of ranks and works out what does not depend on blocks: the runs within a block that are
contiguous at both ends. A read then costs a few array operations, or a short loop over few whole blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from twinpool.kv_transfer.block_table import BlockTable
from twinpool.kv_transfer.copy_table import CopyTable, Rows
from twinpool.kv_transfer.layout import RankLayout

FEW_BLOCKS = 64
"""So many are looked at in Python, which is quicker than numpy with cold caches; see ``block_table``."""

NOTHING = CopyTable(np.empty((0, 3), np.int64))


class ReadPlanner:
    """Plans reads of rank ``target`` from rank ``source``."""

    def __init__(self, source: RankLayout, target: RankLayout) -> None:
        """Raises ValueError if the layouts differ."""
        if source.layout != target.layout:
            raise ValueError(f"layouts differ: {source.layout.text} and {target.layout.text}")
        self.layers = shared_layers(source, target)
        """Layers that are read: those that both ranks hold; empty if they share no head either."""
        first_head = max(source.head_start, target.head_start)
        num_heads = min(source.head_end, target.head_end) - first_head
        self._all_heads = num_heads == source.num_heads == target.num_heads
        self._strides = np.array((source.block_bytes, target.block_bytes), np.int64)
        self._block_bytes = 0
        if self._all_heads and len(self.layers) == source.num_layers == target.num_layers:
            self._block_bytes = source.block_bytes
        self._runs = np.array(
            [
                (_offset(source, layer, half, first_head), _offset(target, layer, half, first_head), length)
                for layer in self.layers
                for half, length in (
                    [(0, source.layer_bytes)]
                    if self._all_heads
                    else [(half, num_heads * source.head_bytes) for half in (0, 1)]
                )
            ],
            np.int64,
        ).reshape(-1, 3)
        """Per layer one run with all heads, or one of K and one of V, each as (source, target, length) in a block."""

    def plan(
        self, source_blocks: Sequence[int], target_blocks: Sequence[int], layer_start: int, layer_end: int
    ) -> CopyTable:
        """Copies, per pair of blocks, what both ranks hold of layers ``[layer_start, layer_end)``.

        Few and large: a range ends only where source or target stop being contiguous. Pairs come in the order of
        source blocks, so that runs of blocks that were allocated downwards merge too. ``source_blocks[i]`` goes to
        ``target_blocks[i]``. Empty if the ranks share no layer or no head.

        Raises ValueError if the block lists have unequal lengths.
        """
        if len(source_blocks) != len(target_blocks):
            raise ValueError(f"{len(source_blocks)} blocks cannot be read into {len(target_blocks)}")
        first, last = max(self.layers.start, layer_start), min(self.layers.stop, layer_end)
        if first >= last or not source_blocks:
            return NOTHING
        if self._block_bytes and last - first == len(self.layers):
            return _whole_blocks(source_blocks, target_blocks, self._block_bytes)
        # Something lies between what is read of two blocks, at one end at least: nothing merges.
        blocks = np.array((source_blocks, target_blocks), np.int64).T
        pattern = self._pattern(first, last)
        rows = np.empty((len(blocks), len(pattern), 3), np.int64)
        rows[:] = pattern
        rows[:, :, :2] += (blocks[np.argsort(blocks[:, 0], kind="stable")] * self._strides)[:, None]
        return CopyTable(rows.reshape(-1, 3))

    def _pattern(self, first: int, last: int) -> Rows:
        """The runs within a block of layers ``[first, last)``."""
        at, end = first - self.layers.start, last - self.layers.start
        if not self._all_heads:
            return self._runs[2 * at : 2 * end]
        run = self._runs[at : at + 1].copy()
        run[0, 2] *= end - at
        return run


def shared_layers(source: RankLayout, target: RankLayout) -> range:
    """Layers that both ranks hold; empty if they share no head either."""
    if max(source.head_start, target.head_start) >= min(source.head_end, target.head_end):
        return range(0)
    return range(max(source.layer_start, target.layer_start), min(source.layer_end, target.layer_end))


def _whole_blocks(source_blocks: Sequence[int], target_blocks: Sequence[int], block_bytes: int) -> CopyTable:
    if len(source_blocks) <= FEW_BLOCKS:
        pairs = sorted(zip(source_blocks, target_blocks, strict=True))
        if not any(s + 1 == after_s and t + 1 == after_t for (s, t), (after_s, after_t) in itertools.pairwise(pairs)):
            return BlockTable([pair[0] for pair in pairs], [pair[1] for pair in pairs], block_bytes)
    blocks = np.array((source_blocks, target_blocks), np.int64).T
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    starts = np.flatnonzero(np.append(True, (np.diff(blocks, axis=0) != 1).any(axis=1)))
    if len(starts) == len(blocks):
        source, target = blocks.T.tolist()
        return BlockTable(source, target, block_bytes)
    rows = np.empty((len(starts), 3), np.int64)
    rows[:, :2] = blocks[starts]
    rows[:, 2] = np.diff(starts, append=len(blocks))
    return CopyTable(rows * block_bytes)


def _offset(rank: RankLayout, layer: int, half: int, head: int) -> int:
    """Offset within a block of a head's K (half 0) or V (half 1) of a layer."""
    within = half * rank.num_heads + head - rank.head_start
    return (layer - rank.layer_start) * rank.layer_bytes + within * rank.head_bytes
