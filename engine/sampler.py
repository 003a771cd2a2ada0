"""Draws tokens: logits in, tokens and log probabilities out, as a function of (seed, output index, choice, logits).

Life of a call to ``sample`` (one per step; the sampler holds nothing between steps that it cannot rebuild):

1. Rows are laid out: a scheduled request has 1 + num_drafts, in draft order.
2. If all rows are greedy and nothing is asked beyond that, one argmax ends it.
3. Otherwise rows go through, in blocks: grammar mask, end tokens below ``min_tokens``, logit bias, penalties
   (``penalties.py``); then argmax, or temperature, top-k, top-p, min-p and the inverse CDF at a keyed uniform
   (``distribution.py``, ``philox.py``). On a GPU one kernel does what follows the penalties, for all rows; on a CPU C++
   does, where it can be compiled, for one row after the other.
4. Drafts are verified: each position was sampled with the key it would have without drafts, so tokens are taken while
   draft = sample, and the first sample that differs is the token that plain decoding would have produced. Output is
   that of plain decoding, exactly; a draft of length 0 changes nothing.
5. Log probabilities, where wanted, are those of the raw logits, which are never modified.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinpool.engine import row_ops
from twinpool.engine.distribution import Filters, draw, scaled, truncate
from twinpool.engine.logprobs import token_logprobs
from twinpool.engine.penalties import AdjustedRow, Adjustments, adjust
from twinpool.engine.per_request import PerRequest
from twinpool.engine.philox import uniforms
from twinpool.engine.plan import Sampled, ScheduledRequest
from twinpool.engine.request import Request, SamplingParams, TokenLogprob
from twinpool.kernels.choice import KernelName, cpu_sampling_for, device_sampling_for
from twinpool.kernels.interface import RowSampling

_SEED_MASK = (1 << 64) - 1


class _Kind(enum.Enum):
    """Rows of one kind share a block: they need the same work."""

    GREEDY = enum.auto()
    FULL = enum.auto()
    TOP_K = enum.auto()
    NUCLEUS = enum.auto()


@dataclass(slots=True)
class _Row:
    """One row of logits. ``tokens`` is filled by sampling, one for each of ``draws`` choices."""

    index: int
    request: Request
    position: int
    draws: int
    kind: _Kind
    allowed: Tensor | None
    adjusted: AdjustedRow | None
    tokens: list[int]

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are."""
        return self.allowed is None and self.adjusted is None


class Sampler:
    """Samples for all requests of a step. Used by one thread."""

    def __init__(
        self, vocab_size: int, stop_ids: frozenset[int], device: torch.device, kernels: KernelName = "auto"
    ) -> None:
        """``stop_ids`` are the model's end tokens; ``vocab_size`` is the width of the logits.

        ``kernels`` is "reference" for torch and numpy alone.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._rows_per_block = row_ops.rows_per_block(device, vocab_size)
        self._cpu_sampling = cpu_sampling_for(kernels, device)
        self._device_sampling = device_sampling_for(device)
        if self._device_sampling is not None:
            # Compiled now, not in the first step.
            self._device_sampling(torch.zeros((1, vocab_size), device=device), np.zeros((1, 5)))
        self._adjustments = PerRequest(lambda request: Adjustments(request, stop_ids, vocab_size))

    def sample(
        self, logits: Tensor, scheduled: Sequence[ScheduledRequest], allowed: Sequence[Tensor | None]
    ) -> list[Sampled]:
        """Samples every row and verifies drafts; mutates nothing.

        ``logits`` ``[rows, vocab]``, any float type: 1 + num_drafts rows of each scheduled request, in order; all
        have ``samples`` set. ``allowed``, aligned with ``scheduled``: int32 bitmasks ``[1 + num_drafts, words]`` or
        None.

        Raises:
            ValueError: rows do not match, or drafts are combined with several samples.
        """
        rows = self._lay_out(logits, scheduled, allowed)
        if self._device_sampling is not None:
            self._sample_rows(self._device_sampling, logits, [rows])
            return self._collect(logits, scheduled, rows)
        plain_greedy = [row for row in rows if row.kind is _Kind.GREEDY and row.plain]
        if plain_greedy:
            every = len(plain_greedy) == len(rows)
            picked = logits if every else logits[[row.index for row in plain_greedy]]
            for row, token in zip(plain_greedy, row_ops.argmax(picked).tolist(), strict=True):
                row.tokens = [token] * row.draws
        rest = [row for row in rows if not row.tokens]
        if rest and self._cpu_sampling is not None:
            self._sample_rows(self._cpu_sampling, logits, _blocks(rest))
        elif rest:
            self._sample_general(logits, rest)
        return self._collect(logits, scheduled, rows)

    def prompt_logprobs(self, logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log probability of ``token_ids[i]`` under row i of ``logits`` ``[rows, vocab]``, with ``top`` alternatives.

        Row i is the model's output at the position before the token.
        """
        return token_logprobs(logits, range(len(token_ids)), token_ids, top, self._cpu_sampling)

    def _lay_out(
        self, logits: Tensor, scheduled: Sequence[ScheduledRequest], allowed: Sequence[Tensor | None]
    ) -> list[_Row]:
        rows: list[_Row] = []
        for entry, mask in zip(scheduled, allowed, strict=True):
            request = entry.request
            if entry.num_drafts and entry.num_samples > 1:
                raise ValueError(f"attempt {request.attempt_id:x}: several samples cannot share a row with drafts")
            kind = self._kind(request.sampling)
            adjustments = self._adjustments.get(request)
            adjusts = adjustments.applies(request)
            for j in range(1 + entry.num_drafts):
                adjusted = AdjustedRow(adjustments, request, j) if adjusts else None
                row_mask = None if mask is None else mask[j]
                rows.append(_Row(len(rows), request, j, entry.num_samples, kind, row_mask, adjusted, []))
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, expected {(len(rows), self._vocab_size)}")
        return rows

    def _kind(self, sampling: SamplingParams) -> _Kind:
        if sampling.temperature == 0 or sampling.top_k == 1:
            return _Kind.GREEDY
        if 0 < sampling.top_k < self._vocab_size:
            return _Kind.TOP_K
        return _Kind.NUCLEUS if sampling.top_p < 1 else _Kind.FULL

    def _sample_general(self, logits: Tensor, rows: Sequence[_Row]) -> None:
        u = self._uniforms(rows)
        for kind in _Kind:
            group = [(row, u[i : i + 1]) for i, row in enumerate(rows) if row.kind is kind]
            for start in range(0, len(group), self._rows_per_block):
                block = group[start : start + self._rows_per_block]
                members = [row for row, _ in block]
                values = self._adjusted_logits(logits, members)
                if kind is _Kind.GREEDY:
                    tokens = row_ops.argmax(values).unsqueeze(-1).expand(-1, u.shape[-1])
                else:
                    z = scaled(values, self._column([row.request.sampling.temperature for row in members]))
                    ids = None
                    if kind is not _Kind.FULL or any(row.request.sampling.min_p > 0 for row in members):
                        z, ids = truncate(z, self._filters(members))
                    tokens = draw(z, torch.from_numpy(np.concatenate([part for _, part in block])).to(self._device))
                    tokens = tokens if ids is None else ids[tokens]
                for row, row_tokens in zip(members, tokens.tolist(), strict=True):
                    row.tokens = row_tokens[: row.draws]

    def _sample_rows(self, sample: RowSampling, logits: Tensor, blocks: Sequence[Sequence[_Row]]) -> None:
        """One call for each block of rows. On a GPU there is one, and its tokens are the step's only transfer back."""
        rows = [row for block in blocks for row in block]
        uniforms = self._uniforms(rows)
        parameters = np.empty((len(rows), 4 + uniforms.shape[1]))
        parameters[:, 4:] = uniforms
        for row, line in zip(rows, parameters, strict=True):
            sampling = row.request.sampling
            line[:4] = (
                0.0 if row.kind is _Kind.GREEDY else sampling.temperature,
                sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size,
                min(sampling.top_p, 1.0),
                math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            )
        start = 0
        for block in blocks:
            end = start + len(block)
            if all(row.plain for row in block):
                values = logits[block[0].index : block[-1].index + 1]
            else:
                values = self._adjusted_logits(logits, block)
            for row, tokens in zip(block, sample(values, parameters[start:end]).tolist(), strict=True):
                row.tokens = tokens[: row.draws]
            start = end

    def _uniforms(self, rows: Sequence[_Row]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Keyed numbers ``[rows, most draws]``; draw i of a row is choice ``request.choice + i``."""
        width = max(row.draws for row in rows)
        seeds = np.array([row.request.sampling.seed & _SEED_MASK for row in rows], dtype=np.uint64)
        indices = np.array([len(row.request.output_ids) + row.position for row in rows], dtype=np.int64)
        choices = np.array([row.request.choice for row in rows], dtype=np.int64)
        choices = (choices[:, None] + np.arange(width)).ravel()
        return uniforms(np.repeat(seeds, width), np.repeat(indices, width), choices).reshape(len(rows), width)

    def _adjusted_logits(self, logits: Tensor, rows: Sequence[_Row]) -> Tensor:
        """Float32 logits of ``rows`` after masks, bias and penalties; a copy only where something changes."""
        first = rows[0].index
        if len(rows) == 1:
            values = logits[first : first + 1].float()
        else:
            values = logits[[row.index for row in rows]].float()
        if all(row.plain for row in rows):
            return values
        if values.data_ptr() == logits[first].data_ptr():
            values = values.clone()
        masks = [row.allowed for row in rows if row.allowed is not None]
        if masks:
            # Rows with and without a mask go through together; all bits set changes nothing.
            everything = torch.full_like(masks[0], -1)
            words = torch.stack([everything if row.allowed is None else row.allowed for row in rows])
            row_ops.forbid(values, words.to(self._device))
        adjust(values, [row.adjusted for row in rows])
        return values

    def _filters(self, rows: Sequence[_Row]) -> Filters:
        sampling = [row.request.sampling for row in rows]
        top_k = [s.top_k if 0 < s.top_k < self._vocab_size else self._vocab_size for s in sampling]
        top_p = [min(s.top_p, 1.0) for s in sampling]
        min_p = [s.min_p for s in sampling]
        return Filters(
            top_k=torch.tensor(top_k, dtype=torch.int64, device=self._device).unsqueeze(-1),
            max_top_k=max(top_k),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=self._device).unsqueeze(-1),
            has_top_p=min(top_p) < 1,
            log_min_p=self._column([math.log(p) if p > 0 else -math.inf for p in min_p]),
            has_min_p=max(min_p) > 0,
        )

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(-1)

    def _collect(self, logits: Tensor, scheduled: Sequence[ScheduledRequest], rows: Sequence[_Row]) -> list[Sampled]:
        result: list[Sampled] = []
        wanted: dict[int, list[tuple[Sampled, int, int]]] = {}
        start = 0
        for entry in scheduled:
            request = entry.request
            own = rows[start : start + 1 + entry.num_drafts]
            start += len(own)
            sources: Sequence[int]
            if entry.num_drafts:
                token_ids = accepted([row.tokens[0] for row in own], request.draft_ids[: entry.num_drafts])
                sources = range(own[0].index, own[0].index + len(token_ids))
            else:
                token_ids = own[0].tokens
                sources = [own[0].index] * len(token_ids)
            sampled = Sampled(token_ids=token_ids)
            result.append(sampled)
            if request.sampling.logprobs is not None:
                wanted.setdefault(request.sampling.logprobs, []).extend(
                    (sampled, index, token) for index, token in zip(sources, token_ids, strict=True)
                )
        for top, items in wanted.items():
            indices, tokens = [index for _, index, _ in items], [token for _, _, token in items]
            entries = token_logprobs(logits, indices, tokens, top, self._cpu_sampling)
            for (sampled, _, _), logprob in zip(items, entries, strict=True):
                sampled.logprobs.append(logprob)
        return result


def _blocks(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Runs of consecutive plain rows, which need no copy; an adjusted row alone, so that its copy stays in cache."""
    blocks: list[list[_Row]] = []
    for row in rows:
        last = blocks[-1][-1] if blocks else None
        if last is not None and row.plain and last.plain and row.index == last.index + 1:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def accepted(samples: Sequence[int], draft_ids: Sequence[int]) -> list[int]:
    """Tokens to emit: samples up to and with the first that differs from its draft, or all if none does.

    ``samples`` has one token more than ``draft_ids``.
    """
    for i, draft_id in enumerate(draft_ids):
        if samples[i] != draft_id:
            return list(samples[: i + 1])
    return list(samples)
