"""How Triton kernels are started: one function, so that what a call would compile can be recorded without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch


class Launch(Protocol):
    """Starts ``kernel`` on a grid of programs."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """``arguments`` are the kernel's, by name, and Triton's own (``num_warps``, ``num_stages``)."""


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Starts ``kernel`` on the device of its tensors; an empty grid starts nothing."""
    if 0 in grid:
        return
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    # Triton takes the thread's current device, which is the first one in threads that never set it.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments)
