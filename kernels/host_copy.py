"""From arrays on the host to tensors on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``, or on a CPU its memory; a GPU is not waited for.

    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
