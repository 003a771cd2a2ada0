"""Which implementation of ``Kernels`` a device gets."""

from __future__ import annotations

import importlib.util
import logging

import torch

from twinpool.kernels.interface import Kernels
from twinpool.kernels.reference import ReferenceKernels


def kernels_for(device: torch.device) -> Kernels:
    """Triton on CUDA devices, where it is installed; else torch. Triton is not imported otherwise."""
    if device.type != "cuda":
        return ReferenceKernels(prepack=True)
    if importlib.util.find_spec("triton") is None:
        logging.getLogger(__name__).warning("no Triton here: the GPU runs plain torch operators, several times slower")
        return ReferenceKernels(prepack=False)
    from twinpool.kernels.triton_kernels import TritonKernels

    return TritonKernels.on(device)
