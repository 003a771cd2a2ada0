"""Memory for packed weights: pieces of large chunks in huge pages, which one layer's weight would not fill.

A chunk is freed with the last tensor that has a piece of it.
"""

from __future__ import annotations

import torch

from twinpool.huge_pages import HUGE_PAGE, ask_for_huge_pages

CHUNK_BYTES = 32 << 20
ALIGNMENT = 64
"""Bytes of a cache line."""


class Arena:
    """Hands out pieces; none is taken back."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor``, on CPU, in the arena."""
        num_bytes = tensor.numel() * tensor.element_size()
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > self._free.numel():
            self._free = _chunk(max(size, CHUNK_BYTES))
        piece, self._free = self._free[:num_bytes], self._free[size:]
        return piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _chunk(num_bytes: int) -> torch.Tensor:
    """Starts at a huge page."""
    memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    ask_for_huge_pages(memory.data_ptr(), memory.numel())
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]
