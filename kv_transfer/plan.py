"""Which bytes to copy between two ranks of any tensor- and pipeline-parallel shapes of one layout."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.kv_transfer.connectors.base import CopyRange
from twinpool.kv_transfer.layout import RankLayout


def plan_reads(
    source: RankLayout,
    target: RankLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    layer_start: int,
    layer_end: int,
) -> list[CopyRange]:
    """Copies, per pair of blocks, what both ranks hold of layers ``[layer_start, layer_end)``.

    Few and large: a range ends only where source or target stop being contiguous. Pairs are visited in the order of
    source blocks, so that runs of blocks that were allocated downwards merge too. ``source_blocks[i]`` goes to
    ``target_blocks[i]``. Empty if the ranks share no layer or no head.

    Raises ValueError if the layouts differ or the block lists have unequal lengths.
    """
    if source.layout != target.layout:
        raise ValueError(f"layouts differ: {source.layout.text} and {target.layout.text}")
    pattern = _block_pattern(source, target, layer_start, layer_end)
    if not pattern:
        return []
    source_stride, target_stride = source.block_bytes, target.block_bytes
    merged: list[CopyRange] = []
    start_s = start_t = end_s = end_t = -1
    for source_block, target_block in sorted(zip(source_blocks, target_blocks, strict=True)):
        base_s, base_t = source_block * source_stride, target_block * target_stride
        for offset_s, offset_t, length in pattern:
            s, t = base_s + offset_s, base_t + offset_t
            if s != end_s or t != end_t:
                if end_s > start_s:
                    merged.append(CopyRange(start_s, start_t, end_s - start_s))
                start_s, start_t = s, t
            end_s, end_t = s + length, t + length
    if end_s > start_s:
        merged.append(CopyRange(start_s, start_t, end_s - start_s))
    return merged


def shared_layers(source: RankLayout, target: RankLayout) -> range:
    """Layers that both ranks hold; empty if they share no head either."""
    if max(source.head_start, target.head_start) >= min(source.head_end, target.head_end):
        return range(0)
    return range(max(source.layer_start, target.layer_start), min(source.layer_end, target.layer_end))


def _block_pattern(
    source: RankLayout, target: RankLayout, layer_start: int, layer_end: int
) -> list[tuple[int, int, int]]:
    """(source offset, target offset, length) of the runs within one pair of blocks, in order."""
    layers = shared_layers(source, target)
    first, last = max(layers.start, layer_start), min(layers.stop, layer_end)
    if first >= last:
        return []
    head_first = max(source.head_start, target.head_start)
    num_heads = min(source.head_end, target.head_end) - head_first
    if num_heads == source.num_heads == target.num_heads:
        return [
            (
                (first - source.layer_start) * source.layer_bytes,
                (first - target.layer_start) * target.layer_bytes,
                (last - first) * source.layer_bytes,
            )
        ]
    return [
        (
            _head_offset(source, layer, half, head_first),
            _head_offset(target, layer, half, head_first),
            num_heads * source.head_bytes,
        )
        for layer in range(first, last)
        for half in (0, 1)
    ]


def _head_offset(rank: RankLayout, layer: int, half: int, head: int) -> int:
    """Offset within a block of a head's K (half 0) or V (half 1) of a layer."""
    within = half * rank.num_heads + head - rank.head_start
    return (layer - rank.layer_start) * rank.layer_bytes + within * rank.head_bytes
