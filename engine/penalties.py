"""What a request adds to its logits before sampling: forbidden end tokens, logit bias and penalties.

An ``Adjustments`` is derived from the request alone and brought up to date from ``request.output_ids`` at each use,
so it is right after preemption, migration and the loss of the object.

Definitions, in this order, on float32 logits:

1. While fewer than ``min_tokens`` tokens are out, the model's end tokens and the request's stop tokens are impossible,
   unless that would leave nothing (a grammar that admits only the end wins).
2. ``logit_bias`` is added.
3. ``repetition_penalty`` r, for each token of prompt or output: positive logits are divided by r, others multiplied
   (Keskar et al., "CTRL", 2019).
4. For each token of the output: minus ``frequency_penalty`` times its count, minus ``presence_penalty``.

A draft counts as output for the positions after it. Ids outside the vocabulary never match anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.engine.request import Request

_NONE = np.zeros(0, dtype=np.int64)


class TokenCounts:
    """How often each token occurs in the output; with ``prompt_ids``, tokens of the prompt are known with count 0."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64)) if len(prompt_ids) else _NONE
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._slots = dict(zip(self._ids.tolist(), range(len(self._ids)), strict=True))
        self._length = len(self._ids)
        self._num_seen = 0

    def update(self, output_ids: Sequence[int]) -> None:
        """Counts the tokens that ``output_ids`` has gained."""
        self._length = self._add(output_ids[self._num_seen :], self._slots)
        self._num_seen = len(output_ids)

    def _add(self, token_ids: Sequence[int], slots: dict[int, int]) -> int:
        for token_id in token_ids:
            slot = slots.setdefault(token_id, len(slots))
            if slot >= len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(max(32, slot), dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(max(32, slot), dtype=np.float32)))
            self._ids[slot] = token_id
            self._counts[slot] += 1
        return len(slots)

    def after(self, draft_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and counts if ``draft_ids`` had been output too. Valid until the next ``update``."""
        ids, counts = self._ids[: self._length], self._counts[: self._length]
        if not draft_ids:
            return ids, counts
        drafted, times = np.unique(np.asarray(draft_ids, dtype=np.int64), return_counts=True)
        slots = np.array([self._slots.get(token_id, -1) for token_id in drafted.tolist()])
        counts = counts.copy()
        counts[slots[slots >= 0]] += times[slots >= 0]
        new = slots < 0
        return np.concatenate((ids, drafted[new])), np.concatenate((counts, times[new].astype(np.float32)))


@dataclass(frozen=True, slots=True)
class AdjustedRow:
    """A row of logits: the ``position``-th of its request's step, after that many drafts."""

    adjustments: Adjustments
    request: Request
    position: int


class Adjustments:
    """One request's changes to its logits."""

    def __init__(self, request: Request, eos_ids: frozenset[int], vocab_size: int) -> None:
        sampling = request.sampling
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self._vocab_size = vocab_size
        self._min_tokens = request.stop.min_tokens
        ends = eos_ids | request.stop.stop_token_ids
        self._ends = self._inside(np.array(sorted(ends), dtype=np.int64)) if self._min_tokens else _NONE
        bias = sorted((token, value) for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size)
        self.bias_ids = np.array([token for token, _ in bias], dtype=np.int64)
        self.bias_values = np.array([value for _, value in bias], dtype=np.float32)
        self._counts: TokenCounts | None = None
        if self.repetition != 1 or self.presence != 0 or self.frequency != 0:
            self._counts = TokenCounts(request.prompt_ids if self.repetition != 1 else ())
        self.never = self._counts is None and len(bias) == 0 and len(self._ends) == 0
        """Nothing is ever adjusted for this request."""

    def _inside(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def applies(self, request: Request) -> bool:
        """Whether logits of the request's next output position are changed; later positions are changed no more."""
        return not self.never and (
            self._counts is not None or len(self.bias_ids) > 0 or len(request.output_ids) < self._min_tokens
        )

    def forbidden(self, output_index: int) -> NDArray[np.int64]:
        """End tokens that are impossible at this output index."""
        return self._ends if output_index < self._min_tokens else _NONE

    def penalised(self, request: Request, position: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens that penalties touch at a draft position, each once, and their counts in the output."""
        if self._counts is None:
            return _NONE, np.zeros(0, dtype=np.float32)
        self._counts.update(request.output_ids)
        ids, counts = self._counts.after(request.draft_ids[:position])
        inside = (ids >= 0) & (ids < self._vocab_size)
        return (ids, counts) if inside.all() else (ids[inside], counts[inside])


def adjust(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> None:
    """Applies the adjustments of ``rows`` to float32 ``logits`` ``[rows, vocab]`` in place."""
    _forbid(logits, rows)
    _bias(logits, rows)
    _penalise(logits, rows)


def _index(device: torch.device, parts: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Row and column index tensors from (row, columns) pairs."""
    rows = np.repeat([row for row, _ in parts], [len(columns) for _, columns in parts])
    columns = np.concatenate([columns for _, columns in parts])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _forbid(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> None:
    parts = []
    for i, row in enumerate(rows):
        if row is not None:
            ends = row.adjustments.forbidden(len(row.request.output_ids) + row.position)
            if len(ends):
                parts.append((i, ends))
    if not parts:
        return
    index = _index(logits.device, parts)
    before = logits[index]
    logits[index] = -torch.inf
    nothing_left = logits.amax(-1) == -torch.inf
    if bool(nothing_left.any()):
        logits[index] = torch.where(nothing_left[index[0]], before, -torch.inf)


def _bias(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> None:
    parts = [
        (i, row.adjustments.bias_ids, row.adjustments.bias_values)
        for i, row in enumerate(rows)
        if row is not None and len(row.adjustments.bias_ids)
    ]
    if parts:
        index = _index(logits.device, [(i, ids) for i, ids, _ in parts])
        values = np.concatenate([values for _, _, values in parts])
        logits[index] += torch.from_numpy(values).to(logits.device)


def _penalise(logits: Tensor, rows: Sequence[AdjustedRow | None]) -> None:
    if logits.device.type == "cpu":
        for values, row in zip(logits.numpy(), rows, strict=True):
            if row is not None:
                _penalise_row(values, row)
        return
    parts, counts, factors = [], [], []
    for i, row in enumerate(rows):
        if row is None:
            continue
        ids, times = row.adjustments.penalised(row.request, row.position)
        if len(ids):
            parts.append((i, ids))
            counts.append(times)
            factors.append((row.adjustments.repetition, row.adjustments.frequency, row.adjustments.presence))
    if not parts:
        return
    device = logits.device
    index = _index(device, parts)
    count = torch.from_numpy(np.concatenate(counts)).to(device)
    spread = np.repeat(np.array(factors, dtype=np.float32), [len(ids) for _, ids in parts], axis=0)
    repetition, frequency, presence = torch.from_numpy(spread).to(device).unbind(-1)
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[index] = values - frequency * count - presence * (count > 0)


def _penalise_row(values: NDArray[np.float32], row: AdjustedRow) -> None:
    """The same in numpy, whose operators on some hundred values take a third of the time of torch's."""
    ids, counts = row.adjustments.penalised(row.request, row.position)
    if len(ids) == 0:
        return
    adjustments = row.adjustments
    repetition = np.float32(adjustments.repetition)
    touched = values[ids]
    touched = np.where(touched > 0, touched / repetition, touched * repetition)
    values[ids] = touched - np.float32(adjustments.frequency) * counts - np.float32(adjustments.presence) * (counts > 0)
