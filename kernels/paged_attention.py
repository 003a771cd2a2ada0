"""Attention of one step on a GPU: which requests go to which Triton kernel, in what tiles.

Requests with few queries (decode, draft verification) go to the decode kernel, whose programs split the keys when
there are fewer requests than the device has processors; the others are cut into tiles of queries. A step of decodes
only copies nothing to the device and asks it nothing, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinpool.kernels.host_copy import to_device
from twinpool.kernels.interface import AttentionBatch
from twinpool.kernels.launch import Launch
from twinpool.kernels.tiles import Tiles, TileShape
from twinpool.kernels.triton_attention import combine_kernel, decode_kernel, prefill_kernel

MAX_DECODE_ROWS = 64
"""(Query, head of a group) pairs of a request up to which it goes to the decode kernel."""
MAX_DECODE_QUERIES = 16
"""Queries of such a request; prompts have more."""
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256
"""Fewer are not worth a program of their own."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step asks of the two kernels, for heads in groups of some size."""

    num_decodes: int
    members: torch.Tensor | None
    """[decodes] int32, None: all requests of the batch."""
    num_queries: int
    """Most queries of a request among the decodes."""
    longest: int
    """Most keys of a request among the decodes."""
    tiles: torch.Tensor | None
    """[tiles, 2] int32: request, first query; longest contexts first."""


class PagedAttention:
    """Implements ``Attention``; see the module."""

    def __init__(self, batch: AttentionBatch, kv: torch.Tensor, processors: int, launch: Launch, tiles: Tiles) -> None:
        self._batch = batch
        self._kv_shape = kv.shape
        self._processors = processors
        self._launch = launch
        self._tiles = tiles
        self._work: dict[int, _Work] = {}

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
        """See ``Attention``; ``key`` and ``value`` are not looked at."""
        num_heads, head_dim = query.shape[1:]
        if query.stride(2) != 1 or query.stride(1) != head_dim:
            query = query.contiguous()
        _, _, _, num_kv_heads, block_size, _ = self._kv_shape
        group = num_heads // num_kv_heads
        dim = max(16, power_of_two(head_dim))
        shape = self._tiles.of_prefill(group, dim, query.element_size())
        work = self._work.get(group)
        if work is None:
            work = self._work[group] = self._divide(group, shape)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        shared: dict[str, Any] = {
            "query": query,
            "kv": kv,
            "output": output,
            "query_start_loc": self._batch.query_start_loc,
            "seq_lens": self._batch.seq_lens,
            "tables": self._batch.block_tables,
            "layer": layer,
            "table_stride": self._batch.block_tables.stride(0),
            "query_stride": query.stride(0),
            "block_stride": kv.stride(0),
            "scale": scale * math.log2(math.e) if soft_cap is None else scale / soft_cap,
            "cap": 0.0 if soft_cap is None else soft_cap * math.log2(math.e),
            "window": 0 if window is None else window,
            "num_kv_heads": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM": dim,
            "BLOCK_SIZE": block_size,
            "WINDOW": window is not None,
            "CAP": soft_cap is not None,
        }
        if work.num_decodes:
            self._decode(work, shared, window)
        if work.tiles is not None:
            self._launch(
                prefill_kernel,
                (len(work.tiles), num_kv_heads),
                **shared,
                tiles=work.tiles,
                ROWS=shape.rows,
                TILE=shape.keys,
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
        return output

    def _decode(self, work: _Work, shared: dict[str, Any], window: int | None) -> None:
        query, head_dim, dim = shared["query"], shared["HEAD_DIM"], shared["DIM"]
        num_kv_heads, group = shared["num_kv_heads"], shared["GROUP"]
        shape = self._tiles.of_decode(decode_rows(work.num_queries, group), dim, query.element_size())
        longest = work.longest if window is None else min(work.longest, window + work.num_queries)
        wanted = self._tiles.programs_per_processor * self._processors
        splits = num_splits(work.num_decodes * num_kv_heads, longest, wanted)
        items = work.num_decodes * work.num_queries
        places = (items, num_kv_heads * group, splits) if splits > 1 else (0, 0, 0)
        partials = torch.empty((*places, head_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((*places, 2), dtype=torch.float32, device=query.device)
        # Without members the kernels never read the pointer; any tensor of its type does.
        members = self._batch.seq_lens if work.members is None else work.members
        self._launch(
            decode_kernel,
            (work.num_decodes, num_kv_heads, splits),
            **shared,
            partials=partials,
            stats=stats,
            members=members,
            num_queries=work.num_queries,
            num_splits=splits,
            ROWS=shape.rows,
            TILE=shape.keys,
            ALL=work.members is None,
            SPLIT=splits > 1,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if splits > 1:
            self._launch(
                combine_kernel,
                (items, num_kv_heads * group),
                partials=partials,
                stats=stats,
                output=shared["output"],
                members=members,
                query_start_loc=shared["query_start_loc"],
                num_queries=work.num_queries,
                num_splits=splits,
                num_heads=num_kv_heads * group,
                HEAD_DIM=head_dim,
                DIM=dim,
                MAX_SPLITS=MAX_SPLITS,
                ALL=work.members is None,
                num_warps=4,
            )

    def _divide(self, group: int, shape: TileShape) -> _Work:
        batch, device = self._batch, self._batch.seq_lens.device
        lengths = np.array(batch.query_lens, np.int32)
        contexts = np.array(batch.context_lens, np.int32)
        few = lengths * group <= MAX_DECODE_ROWS
        few &= lengths <= MAX_DECODE_QUERIES
        num_decodes = int(few.sum())
        members = None
        if 0 < num_decodes < len(few):
            members = to_device(np.flatnonzero(few).astype(np.int32), device)
        queries = power_of_two(int(lengths[few].max(initial=1)))
        tiles = None
        if num_decodes < len(few):
            step = shape.rows // group
            many = np.flatnonzero(~few)
            parts = [(request, first) for request in many for first in range(0, lengths[request], step)]
            pairs = np.array(parts, np.int32)
            ends = contexts[pairs[:, 0]] - lengths[pairs[:, 0]] + pairs[:, 1]
            tiles = to_device(pairs[np.argsort(-ends, kind="stable")], device)
        return _Work(num_decodes, members, queries, int(contexts[few].max(initial=0)), tiles)


def decode_rows(num_queries: int, group: int) -> int:
    """Rows of the decode kernel's tile for up to ``num_queries`` queries of a request."""
    return max(16, power_of_two(power_of_two(num_queries) * group))


def num_splits(programs: int, longest: int, wanted: int) -> int:
    """Programs that share a request's keys: enough for ``wanted`` in all, none with too few keys of ``longest``."""
    return max(1, min(-(-wanted // programs), -(-longest // KEYS_PER_SPLIT), MAX_SPLITS))
