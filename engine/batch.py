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
from twinpool.engine.table_rows import ShortTable, TableRows
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


class BatchBuilder:
    """Flattens the steps of one executor; what a step has in common with earlier ones is kept (``TableRows``)."""

    def __init__(self, *, block_size: int, num_blocks: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = TableRows(num_blocks)

    def build(self, scheduled: Sequence[ScheduledRequest]) -> HostBatch:
        """Flattens the step's requests.

        Raises:
            ValueError: a request without blocks for its tokens, a block id outside ``[1, num_blocks)``, or a token id
                outside the vocabulary. Nothing was written.
        """
        # One pass: what costs is to touch each request, cold after a forward pass, more than once.
        starts: list[int] = []
        lengths: list[int] = []
        ids: list[int] = []
        table_rows: list[int] = []
        sample_rows: list[int] = []
        num_tokens = 0
        for item in scheduled:
            request, length = item.request, item.num_tokens
            start = request.num_computed_tokens
            starts.append(start)
            lengths.append(length)
            num_tokens += length
            if length == 1:
                ids.append(request.token(start))
            else:
                ids += request.tokens(start, start + length - item.num_drafts)
                ids += request.draft_ids[: item.num_drafts]
            if item.samples:
                sample_rows += range(num_tokens - 1 - item.num_drafts, num_tokens)
            table_rows.append(self._tables.row(request))
        input_ids = self._checked(ids, num_tokens)
        positions = seq_starts = np.array(starts, np.int64)
        counts = np.array(lengths, np.int64)
        query_start_loc = np.zeros(len(scheduled) + 1, np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = seq_starts + counts
        try:
            tables = self._tables.gather(table_rows, -(-seq_lens // self._block_size))
        except ShortTable as error:
            raise ValueError(f"attempt {scheduled[error.index].request.attempt_id:x} {error}") from None
        requests = np.arange(len(scheduled))
        if num_tokens > len(scheduled):
            requests = np.repeat(requests, counts)
            positions = np.arange(num_tokens) - np.repeat(query_start_loc[:-1] - seq_starts, counts)
        blocks = positions // self._block_size
        offsets = positions - blocks * self._block_size
        block_ids = tables[requests, blocks]
        parts = (
            input_ids,
            positions,
            block_ids * self._block_size + offsets,
            query_start_loc,
            seq_lens,
            tables.ravel(),
            block_ids[offsets == 0],
            np.array(sample_rows, np.int64),
        )
        return HostBatch(np.concatenate(parts), tuple(part.size for part in parts))

    def _checked(self, ids: list[int], num_tokens: int) -> Int64:
        if len(ids) != num_tokens:
            raise ValueError(f"the step schedules {num_tokens} tokens, but its requests have {len(ids)} of them")
        array = np.array(ids, np.int64)
        if num_tokens and (array.min() < 0 or array.max() >= self._vocab_size):
            bad = array[(array < 0) | (array >= self._vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary of {self._vocab_size}")
        return array


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
