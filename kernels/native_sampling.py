"""Sampling and log probabilities on a CPU in C++ (``sampling.h``): one call for many rows, few passes over each.

Tokens are those of ``engine.distribution``, but where a uniform comes within rounding (about 1e-6) of the boundary
between two tokens: both add float32 weights, in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from twinpool.kernels.interface import LogprobRow
from twinpool.kernels.native_library import NativeLibrary


class NativeSampling:
    """Implements ``RowSampling`` and ``RowLogprobs``."""

    def __init__(self, library: NativeLibrary, *, threads: int) -> None:
        self._library = library
        self._threads = threads

    def __call__(self, logits: torch.Tensor, parameters: npt.NDArray[np.float64]) -> torch.Tensor:
        """See ``RowSampling``."""
        logits = _rows(logits)
        parameters = np.ascontiguousarray(parameters)
        rows, vocab = logits.shape
        draws = parameters.shape[1] - 4
        tokens = torch.empty((rows, draws), dtype=torch.int64)
        self._library.functions(logits.numel()).sample(
            logits.data_ptr(),
            rows,
            logits.stride(0),
            vocab,
            parameters.ctypes.data,
            draws,
            tokens.data_ptr(),
            self._threads,
        )
        return tokens

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[LogprobRow]:
        """See ``RowLogprobs``."""
        logits = _rows(logits)
        vocab = logits.shape[1]
        count, top = len(token_ids), min(top, vocab)
        places = np.array([rows, token_ids], dtype=np.int64)
        values, ids = np.empty((count, top)), np.empty((count, top), dtype=np.int64)
        logprobs, ranks = np.empty(count), np.empty(count, dtype=np.int64)
        self._library.functions(count * vocab).logprobs(
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            places[0].ctypes.data,
            places[1].ctypes.data,
            count,
            top,
            logprobs.ctypes.data,
            ranks.ctypes.data,
            values.ctypes.data,
            ids.ctypes.data,
            self._threads,
        )
        best = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True))
        return list(zip(logprobs.tolist(), ranks.tolist(), best, strict=True))


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Float32 logits with the values of a row side by side; copied only if they are not."""
    logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()
