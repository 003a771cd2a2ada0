"""Cuts a read into slices, so that one call moves a bounded number of bytes and ranges."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.kv_transfer.connectors.base import CopyRange


def slice_ranges(ranges: Sequence[CopyRange], max_bytes: int, max_ranges: int) -> list[list[CopyRange]]:
    """Groups ranges into slices of at most ``max_bytes`` and ``max_ranges``, cutting those that are too long."""
    slices: list[list[CopyRange]] = []
    current: list[CopyRange] = []
    room = max_bytes
    for item in ranges:
        done = 0
        while done < item.length:
            if room == 0 or len(current) == max_ranges:
                slices.append(current)
                current, room = [], max_bytes
            length = min(item.length - done, room)
            current.append(CopyRange(item.source + done, item.target + done, length))
            done += length
            room -= length
    if current:
        slices.append(current)
    return slices
