"""Where KV lives in memory: one region per rank, block-major and head-major.

``[block][layer][K|V][head][slot][dim]``: a block is one contiguous range, a layer group of a block is contiguous,
and so is a head slice of one layer's K or V. Offsets are Python ints (int64 on devices): block stride × id overflows
32 bits at about 800 blocks of a 70B model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV of a whole model, without tensor or pipeline parallelism. Sizes in elements."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def text(self) -> str:
        """Readable form, for messages about mismatches."""
        return (
            f"layers={self.num_layers} kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"block_size={self.block_size} dtype={self.dtype}"
        )

    @property
    def fingerprint(self) -> str:
        """Equal for workers that may exchange KV, whatever their TP and PP."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The part of a layout that one rank holds: layers and heads are half-open ranges."""

    layout: KVLayout
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @classmethod
    def whole(cls, layout: KVLayout) -> RankLayout:
        """A single rank that holds everything."""
        return cls(layout, 0, layout.num_layers, 0, layout.num_kv_heads)

    @property
    def num_layers(self) -> int:
        """Layers held."""
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        """KV heads held."""
        return self.head_end - self.head_start

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K (or V) of one layer of one block."""
        return self.layout.block_size * self.layout.head_dim * DTYPES[self.layout.dtype].itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (K and V) of one block."""
        return 2 * self.num_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the stride between blocks."""
        return self.num_layers * self.layer_bytes

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Views a flat uint8 region as ``[blocks, layers, 2, heads, block_size, head_dim]``; no copy."""
        return region.view(DTYPES[self.layout.dtype]).view(
            -1, self.num_layers, 2, self.num_heads, self.layout.block_size, self.layout.head_dim
        )
