"""The operators on a GPU: Triton where it is faster than torch, torch (cuBLAS) elsewhere.

Nothing here waits for the device or asks it anything. ``launch`` and ``processors`` are given, so that the same calls
run under Triton's interpreter on CPU tensors, and can be recorded on shapes alone and compiled ahead of time.
"""

from __future__ import annotations

import torch

from twinpool.kernels.grouped_experts import TritonExperts
from twinpool.kernels.interface import Attention, AttentionBatch, Experts, Linear
from twinpool.kernels.launch import Launch, launch
from twinpool.kernels.paged_attention import PagedAttention, power_of_two
from twinpool.kernels.reference import ReferenceKernels
from twinpool.kernels.tiles import DEFAULT_TILES, Tiles
from twinpool.kernels.triton_norm import rms_norm_kernel
from twinpool.kernels.triton_pointwise import gated_kernel, rotary_write_kernel

HEADS_PER_PROGRAM = 16
ELEMENTS_PER_PROGRAM = 2048
"""Most heads, and most elements of them, that a program rotates."""
COLUMNS_PER_PROGRAM = 1024


class TritonKernels:
    """Implements ``Kernels``."""

    def __init__(self, processors: int, launch: Launch = launch, tiles: Tiles = DEFAULT_TILES) -> None:
        """``processors`` is the number of streaming multiprocessors to keep busy; ``tiles`` are attention's."""
        self._processors = processors
        self._launch = launch
        self._tiles = tiles
        self._torch = ReferenceKernels(prepack=False)

    @classmethod
    def on(cls, device: torch.device, tiles: Tiles = DEFAULT_TILES) -> TritonKernels:
        """For a CUDA device."""
        return cls(torch.cuda.get_device_properties(device).multi_processor_count, tiles=tiles)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``Kernels.linear``."""
        return self._torch.linear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Kernels.rms_norm``."""
        if x.stride(-1) != 1 or x.dim() not in (2, 3):
            x = x.contiguous().view(-1, x.shape[-1])
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.add_rms_norm``."""
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        width = power_of_two(size)
        heads = x.shape[1] if x.dim() == 3 else 1
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(
            rms_norm_kernel,
            (x.shape[0] * heads,),
            x=x,
            residual=x if residual is None else residual,
            weight=weight,
            output=output,
            eps=eps,
            row_stride=x.stride(0),
            head_stride=x.stride(1) if x.dim() == 3 else 0,
            heads=heads,
            size=size,
            WIDTH=width,
            ADD=residual is not None,
            num_warps=1 if width <= 256 else 4 if width <= 2048 else 8,
        )
        return output

    def rotary_write(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Kernels.rotary_write``."""
        tokens, num_rotated, head_dim = query_key.shape
        num_kv_heads = value.shape[1]
        all_heads = num_rotated + num_kv_heads
        output = torch.empty(query_key.shape, dtype=query_key.dtype, device=query_key.device)
        heads = min(HEADS_PER_PROGRAM, ELEMENTS_PER_PROGRAM // power_of_two(head_dim), power_of_two(all_heads))
        self._launch(
            rotary_write_kernel,
            (tokens, -(-all_heads // heads)),
            query_key=query_key,
            value=value,
            cos=cos,
            sin=sin,
            output=output,
            kv=kv,
            slot_mapping=slot_mapping,
            layer=layer,
            row_stride=query_key.stride(0),
            head_stride=query_key.stride(1),
            value_row_stride=value.stride(0),
            value_head_stride=value.stride(1),
            block_stride=kv.stride(0),
            num_heads=num_rotated - num_kv_heads,
            num_kv_heads=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=kv.shape[4],
            HALF=power_of_two(head_dim // 2),
            HEADS=heads,
            num_warps=4,
        )
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.silu_mul``."""
        return self._gated(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.gelu_tanh_mul``."""
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
        self._launch(
            gated_kernel,
            (rows, -(-size // COLUMNS_PER_PROGRAM)),
            gate_up=gate_up.contiguous(),
            output=output,
            size=size,
            WIDTH=min(COLUMNS_PER_PROGRAM, power_of_two(size)),
            GELU=gelu,
            num_warps=4,
        )
        return output

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.route``."""
        return self._torch.route(logits, num_chosen, normalise=normalise)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """See ``Kernels.experts``."""
        return TritonExperts(gate_up.contiguous(), down.contiguous(), self.silu_mul, self._launch)

    def attention(self, batch: AttentionBatch, kv: torch.Tensor) -> Attention:
        """See ``Kernels.attention``."""
        return PagedAttention(batch, kv, self._processors, self._launch, self._tiles)
