"""Which part of a model a rank holds, and how ranks combine partial results. Passed explicitly, never global.

Column-parallel layers split their output over TP ranks (attention heads, MLP columns, vocabulary), row-parallel layers
their input, and end in an ``all_reduce``. Pipeline stages hold consecutive layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Collective(Protocol):
    """Combines the tensors of all TP ranks of a stage."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may reuse ``x``."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""


class Alone:
    """The collective of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``."""
        return x


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A rank's place in the TP × PP grid."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    collective: Collective = field(default_factory=Alone)

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """This rank's range ``[start, end)`` of ``total`` equal parts.

        Raises:
            ValueError: ``total`` is not divisible by ``tp_size``; ``what`` names it.
        """
        if total % self.tp_size:
            raise ValueError(f"{what} ({total}) cannot be split over tensor parallel size {self.tp_size}")
        size = total // self.tp_size
        return self.tp_rank * size, (self.tp_rank + 1) * size

    def kv_heads(self, total: int) -> tuple[int, int]:
        """This rank's KV heads; with more ranks than heads, neighbouring ranks hold the same head.

        Raises:
            ValueError: neither divides the other.
        """
        if total >= self.tp_size:
            return self.shard(total, "number of KV heads")
        if self.tp_size % total:
            raise ValueError(f"{total} KV heads cannot be replicated over tensor parallel size {self.tp_size}")
        head = self.tp_rank * total // self.tp_size
        return head, head + 1

    def layers(self, total: int) -> tuple[int, int]:
        """This stage's layers ``[start, end)``; early stages take the remainder."""
        size, rest = divmod(total, self.pp_size)
        start = self.pp_rank * size + min(self.pp_rank, rest)
        return start, start + size + (self.pp_rank < rest)
