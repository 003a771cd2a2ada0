"""What a model asks of its operators. ``ReferenceKernels`` is the specification; other implementations must match it.

Shapes use T = tokens of the step, R = requests of the step, H = query heads, G = KV heads, D = head size.
E = experts of a layer, K = experts that a token is sent to, I = inner features of one.
The KV region of a rank is one contiguous tensor ``[blocks, layers, 2, G, block_size, D]`` (index 2: K, then V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Linear = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in] -> [rows, out]`` in the dtype of the input."""

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(x [T, hidden], expert ids [T, K], weights [T, K]) -> [T, hidden]``: each token's weighted sum over its experts.

A row depends on the same row of the arguments only. Ids of a token are distinct; its experts are added in the order of
their ids, so that a result does not depend on the batch.
"""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the queries of a step, and the keys that they may see, are.

    Request r computes rows ``[query_start_loc[r], query_start_loc[r + 1])``, the last tokens of its ``seq_lens[r]``.
    ``query_lens`` and ``context_lens`` repeat the lengths as Python ints, so that a device need not be asked.
    Tensors are int64 and live on the model's device.
    """

    slot_mapping: torch.Tensor
    """[T]: block id × block size + offset in the block, where the KV of each row goes; unique within a step."""
    block_tables: torch.Tensor
    """[R, most blocks]: block ids in order; rows end in zeros (the null block)."""
    query_start_loc: torch.Tensor
    """[R + 1]: prefix sums of the query lengths."""
    seq_lens: torch.Tensor
    """[R]: tokens with KV once the step has written its own."""
    query_lens: Sequence[int]
    context_lens: Sequence[int]


class Attention(Protocol):
    """Attention over one step's batch, prepared once and used by all layers."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Causal attention of ``query`` [T, H, D] over the region ``kv``, which already holds the step's own KV.

        ``key`` and ``value`` [T, G, D] are the rows just written, for implementations that need not read them back.
        Query head h uses KV head h // (H / G). A query at position p sees positions ``(p - window, p]``; None sees
        all up to p. ``soft_cap`` c replaces a score s (after ``scale``) by c · tanh(s / c). Returns [T, H, D].
        """


class RowSampling(Protocol):
    """Draws tokens of all rows of a step where the logits are; ``engine.distribution`` says what filters mean."""

    def __call__(self, logits: torch.Tensor, parameters: npt.NDArray[np.float64]) -> torch.Tensor:
        """Tokens [rows, draws], int64 on the device of ``logits`` [rows, vocab] (any float type; not changed).

        ``parameters`` [rows, 4 + draws]: temperature (0 takes the best token), top-k (the vocabulary where off), top-p
        (1 where off), log of min-p (-inf where off), then a uniform per draw.
        """


LogprobRow = tuple[float, int, tuple[tuple[int, float], ...]]
"""Log probability of a token, its rank, and the best (id, log probability) pairs of its row."""


class RowLogprobs(Protocol):
    """Log probabilities where the logits are; ``engine.logprobs`` says what they are."""

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[LogprobRow]:
        """Of ``token_ids[i]`` in row ``rows[i]`` of ``logits`` [*, vocab] (any float type; not changed).

        The ``top`` best tokens of the row, all if it has fewer, come best first, lower ids first where equal.
        """


class CpuSampling(RowSampling, RowLogprobs, Protocol):
    """Both, on a CPU."""


class Kernels(Protocol):
    """The operators of a rank. None of them keeps state between calls."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepares ``x @ weight.T + bias`` for ``weight`` [out, in]; may keep or repack both, changes neither."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, statistics in float32 (Zhang and Sennrich, 2019).

        The normalised value is rounded to the dtype of ``weight`` before the product, the product to the dtype of
        ``x``: a float32 weight beside a lower ``x`` rounds once, at the end.
        """

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(rms_norm(x + residual), x + residual)``; may overwrite ``residual``."""

    def rotary_write(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Rotates ``query_key`` [T, H + G, D], then writes its last G heads and ``value`` [T, G, D] to their slots.

        Rotation turns the halves of the last dimension by ``cos`` and ``sin`` [T, D / 2] (Su et al., 2021): first half
        x1 · cos − x2 · sin, second half x2 · cos + x1 · sin. Returns the rotated heads [T, H + G, D]; may overwrite
        ``query_key``; touches no other slot of ``kv``. Both may be views with any stride between tokens.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``gate_up`` [T, 2 · I], gate first. Returns [T, I]."""

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Like ``silu_mul``, with the tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts from router ``logits`` [T, E]: ids [T, K] and weights [T, K] in float32.

        Weights are the largest K of the softmax over all experts, in float32; ``normalise`` makes them add up to 1.
        """

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """Prepares gated MLPs (``silu``) for ``gate_up`` [E, 2 · I, hidden], gate first, and ``down`` [E, hidden, I].

        May keep or repack both, changes neither.
        """

    def attention(self, batch: AttentionBatch, kv: torch.Tensor) -> Attention:
        """Prepares attention for one step; valid until the step ends."""
