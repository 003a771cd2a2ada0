"""Memory that a device has left, and whether a rank's weights fit it."""

from __future__ import annotations

from pathlib import Path

import torch

from twinpool.engine.errors import DoesNotFit

GIB = 1 << 30


def available_bytes(device: torch.device) -> int | None:
    """Memory of ``device`` that can still be allocated; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) << 10


def gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each CUDA device."""
    if not torch.cuda.is_available():
        return []
    devices = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [(device.name, device.total_memory) for device in devices]


def check_room(weight_bytes: int, device: torch.device) -> None:
    """Compares what a rank's weights need with what its device has left, before anything is read.

    Raises:
        DoesNotFit: with both sizes.
    """
    available = available_bytes(device)
    if available is not None and weight_bytes > available:
        raise DoesNotFit(
            f"the weights of this rank take {weight_bytes / GIB:.2f} GiB, but {device} has {available / GIB:.2f} GiB "
            "left; raise tp_size or pp_size of the pool, free memory, or take a smaller model or dtype"
        )
