"""Segments that touch become one; segments too long for a message become several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from twinpool.kv_transfer.messages import Segment

MAX_BLOCKS = 8192
"""Blocks per message: at most five bytes each on the wire, so that a message stays under 64 KiB."""


def merge_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Merges each segment into its predecessor where the two are one rectangle of blocks × layers; keeps the order."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if last is not None and last.rank == segment.rank and last.transfer_id == segment.transfer_id:
            same_layers = (last.layer_start, last.layer_end) == (segment.layer_start, segment.layer_end)
            same_blocks = (last.first_block, last.block_ids) == (segment.first_block, segment.block_ids)
            if same_layers and last.first_block + len(last.block_ids) == segment.first_block:
                merged[-1] = replace(last, block_ids=last.block_ids + segment.block_ids)
                continue
            if same_blocks and last.layer_end == segment.layer_start:
                merged[-1] = replace(last, layer_end=segment.layer_end)
                continue
        merged.append(segment)
    return merged


def split_segment(segment: Segment, max_blocks: int = MAX_BLOCKS) -> Iterator[Segment]:
    """Yields ``segment`` in parts of at most ``max_blocks`` blocks."""
    for start in range(0, len(segment.block_ids), max_blocks):
        ids = segment.block_ids[start : start + max_blocks]
        yield replace(segment, first_block=segment.first_block + start, block_ids=ids)
