"""Times the candidates of attention's tiles on the GPU at hand; ``tile_cache`` keeps the winners.

Each candidate is compiled and timed on tensors of random numbers, which are dropped afterwards: the decode kernel over
a full batch and a small one, first its tiles, then how far keys are split; the prefill kernel over a chunk. A candidate
has to be faster than the default by ``MARGIN``, so that noise changes nothing. After ``TIME_LIMIT_S`` none is begun.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from twinpool.kernels.interface import AttentionBatch
from twinpool.kernels.launch import Launch, launch
from twinpool.kernels.paged_attention import PagedAttention, decode_rows, power_of_two
from twinpool.kernels.tiles import (
    PROGRAMS_PER_PROCESSOR,
    AttentionWorkload,
    Tiles,
    TileShape,
    Tuning,
    decode_candidates,
    prefill_candidates,
)

log = logging.getLogger(__name__)

TIME_LIMIT_S = 20.0
"""Most of it goes into compiling, about a second a candidate; timing takes milliseconds."""
MARGIN = 0.98
SMALL_BATCH = 8

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds that a call takes on the device."""


class TileTuner:
    """Times candidates on one device."""

    def __init__(
        self,
        workload: AttentionWorkload,
        device: torch.device,
        processors: int,
        timer: Timer,
        clock: Callable[[], float],
        launch: Launch = launch,
    ) -> None:
        self._workload = workload
        self._device = device
        self._processors = processors
        self._timer = timer
        self._clock = clock
        self._launch = launch

    def tune(self) -> Tuning:
        """Times everything; takes memory for the KV of a batch while it runs."""
        work = self._workload
        deadline = self._clock() + TIME_LIMIT_S
        small = min(work.batch, SMALL_BATCH)
        batches = [self._attention([1] * count, work.context) for count in sorted({small, work.batch})]
        prompt = [self._attention([work.chunk], max(work.chunk, work.context))]
        decodes = [Tiles(decode=shape) for shape in decode_shapes(work)]
        tiles, decode_ms, whole = self._best(decodes, batches, deadline)
        splits = [replace(tiles, programs_per_processor=count) for count in PROGRAMS_PER_PROCESSOR]
        tiles, splits_ms, in_time = self._best(splits, batches, deadline)
        whole &= in_time
        prefills = [replace(tiles, prefill=shape) for shape in prefill_shapes(work)]
        tiles, prefill_ms, in_time = self._best(prefills, prompt, deadline)
        milliseconds = {"decode": (decode_ms[0], splits_ms[1]), "prefill": prefill_ms}
        return Tuning(tiles, milliseconds, whole and in_time)

    def _best(
        self, candidates: Sequence[Tiles], steps: Sequence[Callable[[Tiles], object]], deadline: float
    ) -> tuple[Tiles, tuple[float, float], bool]:
        """The fastest over all steps, relative to the first; its and the first one's sums; if all were timed."""
        first, winner, fastest = [math.inf] * len(steps), 0, float(len(steps)) * MARGIN
        sums = (math.inf, math.inf)
        for number, tiles in enumerate(candidates):
            if number and self._clock() > deadline:
                return candidates[winner], sums, False
            taken = [self._milliseconds(step, tiles) for step in steps]
            if number == 0:
                first, sums = taken, (sum(taken), sum(taken))
            score = sum(
                mine / theirs if mine < math.inf else math.inf for mine, theirs in zip(taken, first, strict=True)
            )
            if number and score < fastest:
                winner, fastest, sums = number, score, (sums[0], sum(taken))
        return candidates[winner], sums, True

    def _milliseconds(self, step: Callable[[Tiles], object], tiles: Tiles) -> float:
        try:
            return self._timer(partial(step, tiles))
        except OutOfResources as error:
            log.info("%s does not fit this device: %s", tiles, error)
            return math.inf

    def _attention(self, lengths: Sequence[int], context: int) -> Callable[[Tiles], object]:
        """Attention of a step of requests with ``lengths`` queries and ``context`` keys each, in blocks of no order."""
        work, device = self._workload, self._device
        count, blocks = len(lengths), -(-context // work.block_size)
        tables = torch.randperm(count * blocks, device=device).view(count, blocks)
        shape = (count * blocks, 1, 2, work.kv_heads, work.block_size, work.head_dim)
        kv = torch.empty(shape, dtype=dtype_of(work), device=device).normal_()
        query = torch.randn((sum(lengths), work.heads, work.head_dim), device=device).to(kv.dtype)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        batch = AttentionBatch(
            slot_mapping=tables.flatten()[: sum(lengths)],
            block_tables=tables,
            query_start_loc=starts,
            seq_lens=torch.full((count,), context, device=device),
            query_lens=list(lengths),
            context_lens=[context] * count,
        )
        prepared: dict[Tiles, PagedAttention] = {}

        def attend(tiles: Tiles) -> object:
            # Kept from call to call, because the first one copies to the device, which a graph must not.
            if tiles not in prepared:
                prepared[tiles] = PagedAttention(batch, kv, self._processors, self._launch, tiles)
            call = partial(prepared[tiles], query, query, query, kv, 0)
            return call(scale=work.head_dim**-0.5, window=work.window, soft_cap=None)

        return attend


def dtype_of(work: AttentionWorkload) -> torch.dtype:
    """Of queries and KV."""
    dtype = getattr(torch, work.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def decode_shapes(work: AttentionWorkload) -> tuple[TileShape, ...]:
    """Candidates for a batch of single queries, the default first."""
    dim = max(16, power_of_two(work.head_dim))
    return decode_candidates(decode_rows(1, work.group), dim, dtype_of(work).itemsize)


def prefill_shapes(work: AttentionWorkload) -> tuple[TileShape, ...]:
    """Candidates for prompts, the default first."""
    return prefill_candidates(work.group, max(16, power_of_two(work.head_dim)), dtype_of(work).itemsize)


def graph_timer(device: torch.device) -> Timer:
    """Fastest of several replays of a CUDA graph, so that what Python takes to launch a kernel does not count."""
    repeats, rounds = 4, 6

    def milliseconds(call: Callable[[], object]) -> float:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(repeats):
                call()
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        fastest = math.inf
        for _ in range(rounds):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            fastest = min(fastest, begin.elapsed_time(end) / repeats)
        return fastest

    return milliseconds


def tune_on(device: torch.device, work: AttentionWorkload, clock: Callable[[], float]) -> Tuning:
    """Times on a CUDA device, and gives the memory back."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.inference_mode(), torch.cuda.device(device):
        tuning = TileTuner(work, device, processors, graph_timer(device), clock).tune()
    torch.cuda.empty_cache()
    return tuning
