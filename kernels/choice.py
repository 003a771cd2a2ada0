"""Which implementation of ``Kernels`` a device gets."""

from __future__ import annotations

import importlib.util

import torch

from twinpool.kernels.interface import Kernels, RowSampling
from twinpool.kernels.reference import ReferenceKernels


def kernels_for(device: torch.device) -> Kernels:
    """Triton on CUDA devices, torch elsewhere; Triton is imported only then.

    Raises:
        ImportError: a CUDA device without Triton; plain torch operators would be several times slower, unnoticed.
    """
    if device.type != "cuda":
        return ReferenceKernels(prepack=True)
    if importlib.util.find_spec("triton") is None:
        raise ImportError(f"{device} needs Triton, which is not installed: pip install 'twinpool[gpu]'")
    from twinpool.kernels.triton_kernels import TritonKernels

    return TritonKernels.on(device)


def row_sampler_for(device: torch.device) -> RowSampling | None:
    """Triton on CUDA devices; None elsewhere, where rows are sampled one after the other."""
    if device.type != "cuda":
        return None
    from twinpool.kernels.row_sampling import RowSampler

    return RowSampler()
