"""A mixture of experts on a GPU; nothing is asked of the device, so a step can be captured in a CUDA graph.

1. (token, choice) pairs are sorted by expert; stable, so a token's experts keep their order.
2. Gate and up of all experts, one grid over tiles of rows; activation; down.
3. Each token's rows are added in float32, in the order of its experts' ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from twinpool.kernels.launch import Launch
from twinpool.kernels.triton_experts import combine_experts_kernel, grouped_matmul_kernel


class TritonExperts:
    """Implements ``Experts``."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        launch: Launch,
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._launch = launch
        self._ids = torch.arange(len(gate_up), device=gate_up.device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        (tokens, num_chosen), num_experts = ids.shape, len(self._ids)
        chosen, order = ids.flatten().sort(stable=True)
        # searchsorted counts without asking the device how large the largest id is, as bincount does.
        ends = torch.searchsorted(chosen, self._ids, right=True)
        # Few rows per expert take the smallest tile that tensor cores know.
        rows = 16 if tokens * num_chosen < 64 * num_experts else 64
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        tile_ends = ((counts + (rows - 1)) // rows).cumsum(0).to(torch.int32)
        most_tiles = min(tokens * num_chosen, tokens * num_chosen // rows + num_experts)

        def multiply(left: torch.Tensor, weight: torch.Tensor, gather: bool) -> torch.Tensor:
            size = weight.shape[1]
            output = torch.empty((tokens * num_chosen, size), dtype=left.dtype, device=left.device)
            columns = 64
            self._launch(
                grouped_matmul_kernel,
                (most_tiles, -(-size // columns)),
                x=left,
                weight=weight,
                output=output,
                order=order,
                ends=ends,
                tile_ends=tile_ends,
                divisor=num_chosen,
                x_stride=left.stride(0),
                num_experts=num_experts,
                in_size=weight.shape[2],
                out_size=size,
                ROWS=rows,
                COLUMNS=columns,
                DEPTH=32 if left.element_size() == 4 else 64,
                GATHER=gather,
                EXPERTS=1 << (num_experts - 1).bit_length(),
                num_warps=4,
                num_stages=3,
            )
            return output

        expanded = multiply(x.contiguous(), self._gate_up, True)
        reduced = multiply(self._activation(expanded), self._down, False)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        output = torch.empty_like(x)
        width = min(512, 1 << (x.shape[1] - 1).bit_length())
        self._launch(
            combine_experts_kernel,
            (tokens, -(-x.shape[1] // width)),
            x=reduced,
            places=places.view(tokens, num_chosen).sort(-1).values,
            order=order,
            weights=weights.contiguous(),
            output=output,
            num_chosen=num_chosen,
            size=x.shape[1],
            WIDTH=width,
            num_warps=4,
        )
        return output
