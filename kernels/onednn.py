"""bf16 linear layers on CPU through oneDNN.

Weights are packed once instead of at each call: 1.3 to 1.7 times faster than ``F.linear`` at 1 to 16 rows. A processor
with neither AMX tiles nor AVX-512 BF16 multiplies float32 faster than bf16 once a batch is large (1.6 times at 512
rows), so there the plain weight is kept too and widened per call: a second copy of the weights in bf16, and no loss,
since both forms accumulate in float32 and round once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

WIDE_ROWS = 128
"""From this many rows on, widening the weight costs less than it saves."""


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether ``OneDnnLinear`` takes ``weight`` on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class OneDnnLinear:
    """``x @ weight.T + bias``; keeps the packed weight and, with ``widen``, the plain one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, widen: bool) -> None:
        """``widen``: multiply large batches in float32 (see the module)."""
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._plain = weight if widen else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``."""
        if self._plain is not None and x.shape[0] >= WIDE_ROWS:
            bias = None if self._bias is None else self._bias.float()
            return F.linear(x.float(), self._plain.float(), bias).to(x.dtype)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return output


def prefers_float32() -> bool:
    """Whether this processor multiplies float32 faster than bf16: it has no instructions for products of bf16."""
    return not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
