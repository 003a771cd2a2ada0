"""The memory of a KV region."""

from __future__ import annotations

import torch

from twinpool.huge_pages import ask_for_huge_pages


def zeroed_region(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 zeros. On a CPU they are in huge pages where there are any: decode steps read most of a region."""
    region = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        ask_for_huge_pages(region.data_ptr(), num_bytes)
    return region.zero_()
