"""Log probabilities of the raw model distribution: the log-softmax of unmodified float32 logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinpool.engine import row_ops
from twinpool.engine.request import TokenLogprob
from twinpool.kernels.interface import RowLogprobs


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], top: int, faster: RowLogprobs | None = None
) -> list[TokenLogprob]:
    """Log probability, rank and ``top`` best alternatives of ``token_ids[i]`` in row ``rows[i]`` of ``[*, vocab]``.

    The rank is 1 plus the number of tokens with a larger logit. ``top`` beyond the vocabulary means all of it.
    ``faster`` does the same.
    """
    if faster is not None:
        entries = faster.logprobs(logits, rows, token_ids, top)
        return [TokenLogprob(token, *entry) for token, entry in zip(token_ids, entries, strict=True)]
    step = row_ops.rows_per_block(logits.device, logits.shape[-1])
    result: list[TokenLogprob] = []
    for start in range(0, len(token_ids), step):
        part = rows[start : start + step]
        block = logits[part[0] : part[0] + 1] if len(part) == 1 else logits[list(part)]
        result += _block(block.float(), token_ids[start : start + step], top)
    return result


def _block(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    maximum = logits.amax(-1, keepdim=True)
    sums = row_ops.chunk_sums(row_ops.weights(logits - maximum))[1]
    normaliser = maximum + sums.sum(-1, keepdim=True).log()
    logit = logits.gather(-1, chosen)
    logprobs = (logit - normaliser).squeeze(-1).tolist()
    ranks = (row_ops.num_above(logits, logit) + 1).tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if top > 0:
        values, indices = row_ops.best(logits, min(top, logits.shape[-1]))
        best = [
            tuple(zip(row_ids, row_values, strict=True))
            for row_ids, row_values in zip(indices.tolist(), (values - normaliser).tolist(), strict=True)
        ]
    return [TokenLogprob(*entry) for entry in zip(token_ids, logprobs, ranks, best, strict=True)]
