"""Decode steps as CUDA graphs: one launch instead of hundreds.

1. At load, for each batch size of a short list (largest first, one memory pool), the forward pass over static buffers
   is run and then captured. All rows are padding at that time.
2. ``run`` copies a step's batch into the buffers, pads it to the next size, replays, and copies the result out.
3. The graphs die with the runner that owns them.

A padding row is a request of one token, its first: it writes to the null block and sees only that slot. Real rows never
see the null block, and their results do not depend on other rows; so padding changes nothing but block 0. Steps with
prompts or drafts, and batches beyond the largest size, run as usual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from twinpool.engine.batch import FlatBatch
from twinpool.kernels.interface import AttentionBatch

Forward = Callable[[FlatBatch], torch.Tensor]
"""Writes the batch's KV and returns final hidden states [T, hidden]."""

Replay = Callable[[], torch.Tensor]

Capture = Callable[[Replay], Replay]
"""Makes a pass over static tensors repeatable: the result computes the same again, from what the tensors hold then."""

DECODE_SIZES = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Batch sizes that are captured. Padding costs at most half of a small batch, and an eighth of one beyond 64."""


class StaticBatch:
    """The buffers of a decode step: ``size`` requests of up to ``max_blocks`` blocks."""

    def __init__(self, size: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._max_context = max_blocks * block_size
        rows = torch.arange(size, device=device)
        self._null_slots = rows % block_size
        self._query_start_loc = torch.arange(size + 1, device=device)
        self._input_ids = torch.zeros_like(rows)
        self._positions = torch.zeros_like(rows)
        self._slots = self._null_slots.clone()
        self._seq_lens = torch.ones_like(rows)
        self._tables = torch.zeros((size, max_blocks), dtype=torch.int64, device=device)
        self._none = torch.zeros(0, dtype=torch.int64, device=device)

    def fill(self, batch: FlatBatch, size: int) -> None:
        """Takes over the requests of ``batch``, one token each; rows up to ``size`` become padding.

        Entries of a row's table behind its last block keep what they held: they are never read.
        """
        source = batch.attention
        used, blocks = source.block_tables.shape
        self._input_ids[:used].copy_(batch.input_ids)
        self._positions[:used].copy_(batch.positions)
        self._slots[:used].copy_(source.slot_mapping)
        self._seq_lens[:used].copy_(source.seq_lens)
        self._tables[:used, :blocks].copy_(source.block_tables)
        if used < size:
            self._input_ids[used:size].zero_()
            self._positions[used:size].zero_()
            self._slots[used:size].copy_(self._null_slots[used:size])
            self._seq_lens[used:size].fill_(1)
            self._tables[used:size, :1].zero_()

    def view(self, size: int) -> FlatBatch:
        """The first ``size`` rows as a batch; what it holds changes with ``fill``."""
        return FlatBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            attention=AttentionBatch(
                slot_mapping=self._slots[:size],
                block_tables=self._tables[:size],
                query_start_loc=self._query_start_loc[: size + 1],
                seq_lens=self._seq_lens[:size],
                query_lens=[1] * size,
                context_lens=[self._max_context] * size,
            ),
            new_blocks=self._none,
            sample_rows=self._query_start_loc[:size],
        )


def null_batch(block_size: int, device: torch.device) -> FlatBatch:
    """A prompt beside a decode, both in the null block: run once, so that kernels are compiled before requests come."""
    prompt = 17
    rows = torch.arange(prompt + 1, device=device)
    return FlatBatch(
        input_ids=torch.zeros_like(rows),
        positions=rows % prompt,
        attention=AttentionBatch(
            slot_mapping=rows % block_size,
            block_tables=torch.zeros((2, -(-prompt // block_size)), dtype=torch.int64, device=device),
            query_start_loc=torch.tensor([0, prompt, prompt + 1], device=device),
            seq_lens=torch.tensor([prompt, 1], device=device),
            query_lens=[prompt, 1],
            context_lens=[prompt, 1],
        ),
        new_blocks=rows[:0],
        sample_rows=rows[:0],
    )


class DecodeGraphs:
    """See the module."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Captures ``forward`` for ascending ``sizes``; writes the null block. ``max_blocks`` bounds a request."""
        self._sizes = list(sizes)
        self._max_blocks = max_blocks
        self._static = StaticBatch(self._sizes[-1], max_blocks, block_size, device)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):
            self._replays[size] = capture(partial(forward, self._static.view(size)))

    def takes(self, batch: FlatBatch) -> bool:
        """Whether ``batch`` is a step of single tokens that fits."""
        count, blocks = batch.attention.block_tables.shape
        return count == len(batch.input_ids) and 0 < count <= self._sizes[-1] and blocks <= self._max_blocks

    def run(self, batch: FlatBatch) -> torch.Tensor:
        """Final hidden states [T, hidden] of a batch that ``takes`` accepts: a new tensor."""
        count = len(batch.input_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._static.fill(batch, size)
        return self._replays[size]()[:count].clone()


class CudaCapture:
    """Implements ``Capture`` on a CUDA device; all graphs share one memory pool, so they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Replay) -> Replay:
        """Runs ``step`` twice, which compiles kernels and sets libraries up, then captures it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (transfers) may call CUDA meanwhile; only this thread's calls must be fit for a graph.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
