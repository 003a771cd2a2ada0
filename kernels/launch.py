"""How Triton kernels are started: one function, so that what a call would compile can be recorded without a GPU."""

from __future__ import annotations

from typing import Any, Protocol


class Launch(Protocol):
    """Starts ``kernel`` on a grid of programs."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """``arguments`` are the kernel's, by name, and Triton's own (``num_warps``, ``num_stages``)."""


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Starts ``kernel`` on the device of its tensors; an empty grid starts nothing."""
    if 0 not in grid:
        kernel[grid](**arguments)
