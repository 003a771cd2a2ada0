"""From adjusted logits to tokens: temperature, top-k, top-p, min-p, then the inverse of the CDF at a keyed uniform.

Life of a block of rows (callers own the tensors; ``z`` is mutated):

1. ``scaled`` shifts each row to a maximum of 0 and divides by the temperature.
2. ``truncate`` drops tokens: each filter keeps a prefix of the order (logit descending, token id ascending). First
   the ``top_k`` best; then the shortest prefix of those whose share of their mass reaches ``top_p``; then those with
   at least ``min_p`` times the best token's probability. At least one token stays.
3. ``draw`` takes the first token, in token id order, at which the running sum exceeds u times the total.

Arithmetic: probabilities are float32 and not normalised; they are summed in float32 inside fixed chunks of 128 tokens
and in float64 beyond, where rounding cannot move a boundary by more than about 1e-7 of the total. The uniform's target
is kept strictly below the total, so that no u, however near 1, selects a token of probability zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine import row_ops

_CHUNK = 128


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
    broken = ~maximum.isfinite()
    if bool(broken.any()):
        z.masked_fill_(broken, -torch.inf)
        z[:, :1].masked_fill_(broken, 0.0)
    return z.div_(temperature)


def truncate(z: Tensor, filters: Filters) -> None:
    """Sets the scaled logits of dropped tokens to -inf in place."""
    vocab = z.shape[-1]
    if filters.max_top_k >= vocab and not filters.has_top_p:
        if filters.has_min_p:
            row_ops.drop_below(z, filters.log_min_p)
        return
    if filters.max_top_k < vocab:
        ranked = row_ops.largest(z, filters.max_top_k)
    else:
        # Tokens below (1 - top_p) / vocab of the mass sum to less than 1 - top_p: never part of the nucleus. Half of
        # that leaves room for rounding.
        mass = _chunk_sums(z.exp())[1].sum(-1, keepdim=True)
        floor = torch.log((1 - filters.top_p).clamp_min(1e-300) * mass * (0.5 / vocab)).float()
        ranked = row_ops.descending(z, torch.minimum(floor, torch.zeros_like(floor)))
    rank = torch.arange(ranked.shape[-1], device=z.device)
    kept = rank < filters.top_k
    if filters.has_top_p:
        weights = ranked.exp().double().mul_(kept)
        before = weights.cumsum(-1) - weights
        # Without top-k the ranked tokens may lack the far tail, so the mass is that of all tokens.
        total = mass if filters.max_top_k >= vocab else weights.sum(-1, keepdim=True)
        kept &= (before < filters.top_p * total) | (filters.top_p >= 1)
    if filters.has_min_p:
        kept &= ranked >= filters.log_min_p
    num_kept = kept.sum(-1, keepdim=True).clamp_min(1)
    threshold = ranked.gather(-1, num_kept - 1)
    if bool((row_ops.drop_below(z, threshold) > num_kept).any()):
        _drop_ties(z, threshold, num_kept, ranked)


def _drop_ties(z: Tensor, threshold: Tensor, num_kept: Tensor, ranked: Tensor) -> None:
    """Of the tokens tied at the threshold keeps the lowest ids, so that ``num_kept`` stay."""
    quota = num_kept - (ranked > threshold).sum(-1, keepdim=True)
    tied = z == threshold
    z.masked_fill_(tied & (tied.cumsum(-1) > quota), -torch.inf)


def draw(z: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 ``[rows, draws]`` at the uniforms ``u`` float64 ``[rows, draws]``, from scaled logits ``z``."""
    weights, sums = _chunk_sums(z.exp())
    cumulative = sums.cumsum(-1)
    target = _below(u * cumulative[:, -1:], cumulative[:, -1:])
    # The first chunk whose running sum exceeds the target: its own sum is above zero.
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_max_(sums.shape[-1] - 1)
    target -= cumulative.gather(-1, chunk) - sums.gather(-1, chunk)
    rows = torch.arange(len(z), device=z.device).unsqueeze(-1)
    inside = weights[rows, chunk].double().cumsum(-1)
    target = _below(target.clamp_min_(0), inside[..., -1])
    return chunk * _CHUNK + (inside <= target.unsqueeze(-1)).sum(-1).clamp_max_(_CHUNK - 1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """``target``, or the largest number below ``total`` where it is not below."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _chunk_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as ``[rows, chunks, 128]`` and the chunks' sums as float64 ``[rows, chunks]``."""
    rows, length = weights.shape
    if length % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -length % _CHUNK))
    chunks = weights.view(rows, -1, _CHUNK)
    return chunks, chunks.sum(-1).double()
