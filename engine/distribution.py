"""From adjusted logits to tokens: temperature, top-k, top-p, min-p, then the inverse of the CDF at a keyed uniform.

Life of a block of rows (callers own the tensors; ``z`` is overwritten):

1. ``scaled`` shifts each row to a maximum of 0 and divides by the temperature.
2. ``truncate`` drops tokens: each filter keeps a prefix of the order (logit descending, token id ascending). First
   the ``top_k`` best; then the shortest prefix of those whose share of their mass reaches ``top_p``; then those with
   at least ``min_p`` times the best token's probability. At least one token stays.
3. ``draw`` takes the first kept token, in token id order, at which the running sum exceeds u times the total.

Arithmetic: probabilities are float32 and not normalised; they are summed in float32 inside fixed chunks of 128 tokens
and in float64 beyond, where rounding cannot move a boundary by more than about 1e-7 of the total. The uniform's target
is kept strictly below the total, so that no u, however near 1, selects a token of probability zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine import row_ops


@dataclass(frozen=True, slots=True)
class Filters:
    """Truncation of each row of a block; tensors ``[rows, 1]`` on the logits' device.

    ``top_k`` int64, the vocabulary size where off; ``max_top_k`` its maximum. It is on in all rows of a block or in
    none. ``top_p`` float64, 1 where off; without top-k it is on in all rows or in none. ``log_min_p`` float32, -inf
    where off.
    """

    top_k: Tensor
    max_top_k: int
    top_p: Tensor
    has_top_p: bool
    log_min_p: Tensor
    has_min_p: bool


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """``(logits - max) / temperature`` as new float32 ``[rows, vocab]``; ``temperature`` ``[rows, 1]`` > 0.

    Subtracting first keeps tiny temperatures from overflowing. A row without a finite maximum (a NaN, or nothing
    allowed) has no distribution: it becomes certainty of token 0, so that one bad request cannot stop a batch.
    """
    maximum = logits.amax(-1, keepdim=True)
    z = logits - maximum
    if not bool(maximum.isfinite().all()):
        broken = ~maximum.isfinite()
        z.masked_fill_(broken, -torch.inf)
        z[:, :1].masked_fill_(broken, 0.0)
    return z.div_(temperature)


def truncate(z: Tensor, filters: Filters) -> tuple[Tensor, Tensor | None]:
    """Applies the filters; returns scaled logits ``[rows, n]`` and the token ids ``[n]`` of their columns.

    Ids are None where columns are token ids; then dropped tokens have -inf (and ``z`` was mutated). Otherwise, always
    for a single row, only the kept tokens are returned, in id order.
    """
    vocab = z.shape[-1]
    if filters.max_top_k >= vocab and not filters.has_top_p:
        if not filters.has_min_p:
            return z, None
        return _keep(z, filters.log_min_p, None)
    if filters.max_top_k < vocab:
        ranked = row_ops.best(z, filters.max_top_k)[0]
        total = None
    else:
        # Tokens below (1 - top_p) / vocab of the mass sum to less than 1 - top_p: never part of the nucleus. Half of
        # that leaves room for rounding.
        total = row_ops.chunk_sums(row_ops.weights(z))[1].sum(-1, keepdim=True)
        floor = torch.log((1 - filters.top_p) * total * (0.5 / vocab)).clamp_(-87, 0)
        ranked = row_ops.descending(z, floor, filters.top_p * total)
    kept = torch.arange(ranked.shape[-1], device=z.device) < filters.top_k
    if filters.has_top_p:
        weights = row_ops.weights(ranked).double().mul_(kept)
        if total is None:
            total = weights.sum(-1, keepdim=True)
        before = weights.cumsum(-1) - weights
        kept &= (before < filters.top_p * total) | (filters.top_p >= 1)
    if filters.has_min_p:
        kept &= ranked >= filters.log_min_p
    num_kept = kept.sum(-1, keepdim=True).clamp_min(1)
    threshold = ranked.gather(-1, num_kept - 1)
    return _keep(z, threshold, num_kept - (ranked > threshold).sum(-1, keepdim=True))


def _keep(z: Tensor, threshold: Tensor, quota: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Keeps what is above ``threshold`` and, of the tokens at it, the ``quota`` lowest ids; both ``[rows, 1]``."""
    ids = None
    if len(z) == 1:
        ids = row_ops.at_least(z[0], threshold)
        z = z[:, ids]
    else:
        z.masked_fill_(z < threshold, -torch.inf)
    if quota is not None:
        tied = z == threshold
        if bool((tied.sum(-1, keepdim=True) > quota).any()):
            z.masked_fill_(tied & (tied.cumsum(-1) > quota), -torch.inf)
    return z, ids


def draw(z: Tensor, u: Tensor) -> Tensor:
    """Columns int64 ``[rows, draws]`` at the uniforms ``u`` float64 ``[rows, draws]``."""
    weights, sums = row_ops.chunk_sums(row_ops.weights(z))
    cumulative = sums.cumsum(-1)
    target = _below(u * cumulative[:, -1:], cumulative[:, -1:])
    # The first chunk whose running sum exceeds the target: its own sum is above zero.
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_max_(sums.shape[-1] - 1)
    target -= cumulative.gather(-1, chunk) - sums.gather(-1, chunk)
    rows = torch.arange(len(z), device=z.device).unsqueeze(-1)
    inside = weights[rows, chunk].double().cumsum(-1)
    target = _below(target.clamp_min_(0), inside[..., -1])
    return chunk * row_ops.CHUNK + (inside <= target.unsqueeze(-1)).sum(-1).clamp_max_(row_ops.CHUNK - 1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """``target``, or the largest number below ``total`` where it is not below."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
