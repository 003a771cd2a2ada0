"""The flat batch: all tokens of a step in one row, without padding.

slot = block_table[position // block_size] × block_size + position % block_size. Everything is computed with numpy on
the host (``HostBatch``), may travel to other ranks, and reaches each device in one copy (``FlatBatch``). A batch is
valid for one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twinpool.engine.plan import ScheduledRequest
from twinpool.kernels.host_copy import to_device
from twinpool.kernels.interface import AttentionBatch

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Inputs of one forward pass; T tokens, int64 tensors on the model's device."""

    input_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T]: position of each token in prompt + output + drafts."""
    attention: AttentionBatch
    new_blocks: torch.Tensor
    """Blocks whose slot 0 this step writes."""
    sample_rows: torch.Tensor
    """Rows whose logits are sampled, in the order of the plan: 1 + num_drafts each (1 if several samples)."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch on the host: the parts of ``FlatBatch`` one after the other, int64, and their sizes."""

    flat: Int64
    sizes: tuple[int, ...]

    def on(self, device: torch.device) -> FlatBatch:
        """The batch on ``device``."""
        parts = torch.split(to_device(self.flat, device), list(self.sizes))
        ends = np.cumsum(self.sizes)
        seq_lens = self.flat[ends[3] : ends[4]]
        return FlatBatch(
            input_ids=parts[0],
            positions=parts[1],
            attention=AttentionBatch(
                slot_mapping=parts[2],
                query_start_loc=parts[3],
                seq_lens=parts[4],
                block_tables=parts[5].view(len(seq_lens), -1),
                query_lens=np.diff(self.flat[ends[2] : ends[3]]).tolist(),
                context_lens=seq_lens.tolist(),
            ),
            new_blocks=parts[6],
            sample_rows=parts[7],
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.sizes[0]

    @property
    def num_sample_rows(self) -> int:
        """Rows that are sampled."""
        return self.sizes[7]

    @property
    def sample_rows(self) -> Int64:
        """See ``FlatBatch.sample_rows``."""
        return self.flat[self.flat.size - self.sizes[7] :]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows ``[start, end)`` whose logits predict ``token_ids``, prompt tokens of ``scheduled[index]``."""

    index: int
    start: int
    end: int
    token_ids: Sequence[int]


def build_batch(
    scheduled: Sequence[ScheduledRequest], *, block_size: int, num_blocks: int, vocab_size: int
) -> HostBatch:
    """Flattens the step's requests.

    Raises:
        ValueError: a request without blocks for its tokens, a block id outside ``[1, num_blocks)``, or a token id
            outside the vocabulary. Nothing was written.
    """
    starts = np.fromiter((s.request.num_computed_tokens for s in scheduled), np.int64, len(scheduled))
    lengths = np.fromiter((s.num_tokens for s in scheduled), np.int64, len(scheduled))
    query_start_loc = np.zeros(len(scheduled) + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    seq_lens = starts + lengths
    num_tokens = int(query_start_loc[-1])
    input_ids = _input_ids(scheduled, num_tokens, vocab_size)
    tables = _block_tables(scheduled, seq_lens, block_size, num_blocks)
    rows = np.arange(num_tokens, dtype=np.int64)
    positions = rows - np.repeat(query_start_loc[:-1] - starts, lengths)
    requests = np.repeat(np.arange(len(scheduled)), lengths)
    slots = tables[requests, positions // block_size] * block_size + positions % block_size
    new_blocks = slots[slots % block_size == 0] // block_size
    sample_rows = _sample_rows(scheduled, query_start_loc)
    parts = (input_ids, positions, slots, query_start_loc, seq_lens, tables.ravel(), new_blocks, sample_rows)
    return HostBatch(np.concatenate(parts), tuple(part.size for part in parts))


def prompt_rows(scheduled: Sequence[ScheduledRequest]) -> list[PromptRows]:
    """The rows that prompt log-probabilities need: position p predicts token p + 1, while that is in the prompt."""
    wanted = []
    row = 0
    for index, item in enumerate(scheduled):
        request = item.request
        if request.sampling.prompt_logprobs is not None:
            first = request.num_computed_tokens
            end = min(first + item.num_tokens, request.num_prompt_tokens - 1)
            if end > first:
                wanted.append(PromptRows(index, row, row + end - first, request.tokens(first + 1, end + 1)))
        row += item.num_tokens
    return wanted


def _input_ids(scheduled: Sequence[ScheduledRequest], num_tokens: int, vocab_size: int) -> Int64:
    ids: list[int] = []
    for item in scheduled:
        request = item.request
        start = request.num_computed_tokens
        if item.num_tokens == 1:
            ids.append(request.token(start))
            continue
        ids += request.tokens(start, start + item.num_tokens - item.num_drafts)
        ids += request.draft_ids[: item.num_drafts]
    if len(ids) != num_tokens:
        raise ValueError(f"the step schedules {num_tokens} tokens, but its requests have {len(ids)} of them")
    array = np.array(ids, np.int64)
    if num_tokens and (array.min() < 0 or array.max() >= vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    return array


def _block_tables(scheduled: Sequence[ScheduledRequest], seq_lens: Int64, block_size: int, num_blocks: int) -> Int64:
    counts = -(-seq_lens // block_size)
    tables = np.zeros((len(scheduled), int(counts.max(initial=1))), np.int64)
    ids: list[int] = []
    for item, count in zip(scheduled, counts.tolist(), strict=True):
        block_ids = item.request.block_ids
        if len(block_ids) < count:
            raise ValueError(
                f"attempt {item.request.attempt_id:x} needs {count} blocks for its tokens and has {len(block_ids)}"
            )
        ids += block_ids[:count]
    # One conversion and one scatter for all rows: per row they cost more than the rest of the batch.
    used = np.arange(tables.shape[1]) < counts[:, None]
    tables[used] = np.array(ids, np.int64)
    outside = used & ((tables < 1) | (tables >= num_blocks))
    if outside.any():
        attempt = scheduled[int(outside.any(axis=1).argmax())].request.attempt_id
        raise ValueError(f"attempt {attempt:x} has a block id outside [1, {num_blocks})")
    return tables


def _sample_rows(scheduled: Sequence[ScheduledRequest], query_start_loc: Int64) -> Int64:
    ends = query_start_loc[1:].tolist()
    rows: list[int] = []
    for item, end in zip(scheduled, ends, strict=True):
        if item.samples:
            rows.extend(range(end - 1 - item.num_drafts, end))
    return np.array(rows, np.int64)
