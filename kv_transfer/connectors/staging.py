"""Copies between ranges of a region and flat buffers, which is what travels: on the host, on a GPU, or between both."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch

from twinpool.kv_transfer.connectors.pair_messages import Transport


def new_stream(device: torch.device) -> Any:
    """A CUDA stream; torch's classes for these have no types."""
    stream: Any = torch.cuda.Stream
    return stream(device)


def record_event(blocking: bool = False) -> Any:
    """A CUDA event behind what is on the current stream; ``blocking``: waiting for it sleeps instead of spinning."""
    make: Any = torch.cuda.Event
    event = make(blocking=blocking)
    event.record()
    return event


class Staging:
    """Buffers for one region and one transport; a buffer is flat uint8 of ``buffer_bytes``.

    Between host and host no torch operation is used: those would start worker threads of their own per thread of ours.
    On a GPU, copies run on the caller's current stream.
    """

    def __init__(self, region: torch.Tensor, transport: Transport, buffer_bytes: int) -> None:
        self._region = region
        self._buffer_bytes = buffer_bytes
        self._on_host = region.device.type == "cpu"
        self.direct = self._on_host or transport == "nccl"
        """Whether a part of the region can be sent as it is."""

    def buffer(self) -> torch.Tensor:
        """A new buffer: beside the region for NCCL, in host memory (pinned for a GPU's sake) for gloo."""
        if self._on_host:
            return torch.empty(self._buffer_bytes, dtype=torch.uint8)
        if self.direct:
            return torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._region.device)
        return torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True)

    def gather(self, ranges: Iterable[tuple[int, int]], buffer: torch.Tensor) -> None:
        """Copies (offset, length) of the region into ``buffer``, one after the other; complete for gloo on return."""
        done = 0
        region_at, buffer_at = self._region.data_ptr(), buffer.data_ptr()
        for offset, length in ranges:
            if self._on_host:
                ctypes.memmove(buffer_at + done, region_at + offset, length)
            else:
                part = buffer[done : done + length]
                part.copy_(self._region[offset : offset + length], non_blocking=True)
            done += length
        if not self.direct:
            torch.cuda.current_stream(self._region.device).synchronize()

    def scatter(self, buffer: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies ``buffer`` to (offset, length) of the region; complete on return on the host only."""
        done = 0
        region_at, buffer_at = self._region.data_ptr(), buffer.data_ptr()
        for offset, length in ranges:
            if self._on_host:
                ctypes.memmove(region_at + offset, buffer_at + done, length)
            else:
                part = buffer[done : done + length]
                self._region[offset : offset + length].copy_(part, non_blocking=True)
            done += length
