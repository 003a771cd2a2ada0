"""Which part of a model a rank holds, and how ranks combine partial results. Passed explicitly, never global.

Column-parallel layers split their output over TP ranks (attention heads, MLP columns, vocabulary), row-parallel layers
their input, and end in an ``all_reduce``. Pipeline stages hold consecutive layers and hand hidden states on. Ranks are
numbered stage by stage: ``pp_rank * tp_size + tp_rank``; rank 0 schedules and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from twinpool.engine.errors import UnsupportedModel


class Collective(Protocol):
    """Combines the tensors of all TP ranks of a stage."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may reuse ``x``."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""


class Peers(Protocol):
    """Carries tensors between any two ranks, in order per pair."""

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Starts to send ``x``, which nobody may write any more. Waits only if many sends are under way."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """The next tensor that ``rank`` sends us, which has this shape and dtype."""


class Alone:
    """Collective and peers of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``."""
        return x

    def send(self, x: torch.Tensor, rank: int) -> None:
        """There is nobody."""
        raise AssertionError(f"a single rank sends to rank {rank}")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """There is nobody."""
        raise AssertionError(f"a single rank receives from rank {rank}")


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A rank's place in the TP × PP grid."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    collective: Collective = field(default_factory=Alone)
    peers: Peers = field(default_factory=Alone)
    """Hidden states, from stage to stage."""
    results: Peers = field(default_factory=Alone)
    """Logits, from the last stage to rank 0. On their own: NCCL runs what goes between two ranks one after the other,
    and two stages that each wait to be taken from would wait for ever."""

    @property
    def rank(self) -> int:
        """This rank's number in its worker."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Ranks of the worker."""
        return self.tp_size * self.pp_size

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp_rank == self.pp_size - 1

    def at(self, rank: int) -> ParallelContext:
        """The place of another rank of the worker, without its connections."""
        return ParallelContext(rank % self.tp_size, self.tp_size, rank // self.tp_size, self.pp_size)

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """This rank's range ``[start, end)`` of ``total`` equal parts.

        Raises:
            UnsupportedModel: ``total`` is not divisible by ``tp_size``; ``what`` names it.
        """
        if total % self.tp_size:
            raise UnsupportedModel(f"{what} ({total}) cannot be split over tensor parallel size {self.tp_size}")
        size = total // self.tp_size
        return self.tp_rank * size, (self.tp_rank + 1) * size

    def kv_heads(self, total: int) -> tuple[int, int]:
        """This rank's KV heads; with more ranks than heads, neighbouring ranks hold the same head.

        Raises:
            UnsupportedModel: neither divides the other.
        """
        if total >= self.tp_size:
            return self.shard(total, "number of KV heads")
        if self.tp_size % total:
            raise UnsupportedModel(f"{total} KV heads cannot be replicated over tensor parallel size {self.tp_size}")
        head = self.tp_rank * total // self.tp_size
        return head, head + 1

    def vocabulary(self, total: int) -> tuple[int, int, int]:
        """This rank's tokens ``[start, end)``, and the size that the largest part has: parts may be unequal."""
        size = -(-total // self.tp_size)
        start = min(self.tp_rank * size, total)
        return start, min(start + size, total), size

    def layers(self, total: int) -> tuple[int, int]:
        """This stage's layers ``[start, end)``; early stages take the remainder."""
        size, rest = divmod(total, self.pp_size)
        start = self.pp_rank * size + min(self.pp_rank, rest)
        return start, start + size + (self.pp_rank < rest)
