"""The KV region of one rank, as the engine sees it.

Life cycle: a connector allocates (and registers) the flat region and frees it; this object only views it. Block 0, the
null block, pads block tables and takes what padding rows of captured decode steps write. A block is cleared when a step
first writes its slot 0, so that slots which are not yet written hold zeros: whatever another request left there, NaN
included, is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinpool.kv_transfer.layout import RankLayout


class KVCache:
    """``blocks`` views the region as ``[blocks, layers, 2, heads, block_size, head_dim]``."""

    def __init__(self, region: torch.Tensor, layout: RankLayout) -> None:
        if region.dtype != torch.uint8 or region.dim() != 1 or region.numel() % layout.block_bytes:
            raise ValueError(
                f"a KV region is flat uint8 and whole blocks of {layout.block_bytes} bytes, "
                f"not {list(region.shape)} of {region.dtype}"
            )
        self.layout = layout
        self.blocks = layout.view(region)
        self.blocks[0].zero_()

    @property
    def num_blocks(self) -> int:
        """Blocks in the region, the null block included."""
        return self.blocks.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.layout.block_size

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) blocks, all layers. Sources are read before any target is written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.blocks.device).T
        self.blocks[targets] = self.blocks[sources]

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes blocks; ``block_ids`` is int64 on the region's device."""
        if block_ids.numel():
            self.blocks.index_fill_(0, block_ids, 0)
