"""Sampling on a GPU: logits and parameters of all rows in, tokens out, in one kernel and without waiting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from twinpool.kernels.host_copy import to_device
from twinpool.kernels.launch import Launch, launch
from twinpool.kernels.triton_sampling import sample_kernel

COLUMNS = 4096


class RowSampler:
    """Implements ``RowSampling``."""

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

    def __call__(self, logits: torch.Tensor, parameters: npt.NDArray[np.float64]) -> torch.Tensor:
        """See ``RowSampling``."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        rows, vocab = logits.shape
        draws = parameters.shape[1] - 4
        tokens = torch.empty((rows, draws), dtype=torch.int64, device=logits.device)
        self._launch(
            sample_kernel,
            (rows,),
            logits=logits,
            parameters=to_device(parameters, logits.device),
            tokens=tokens,
            draws=draws,
            vocab=vocab,
            row_stride=logits.stride(0),
            BLOCK=min(COLUMNS, 1 << (vocab - 1).bit_length()),
            num_warps=8,
        )
        return tokens
