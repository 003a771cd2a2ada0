# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code of attention over paged KV: online softmax over tiles of keys (Dao, 2023), in decode split over programs
(Flash-Decoding, 2023).

Rows of a program are (query, query head) pairs that share one KV head, so that each key is loaded once per group.
Scores are kept in units of log 2. Nothing behind a request's last key is ever loaded: what the rest of its last block,
or the null block, holds cannot reach a result. Offsets into the KV region are 64 bits wide. Numbers that change from
step to step, and the alignment of a batch's parts, are not compiled into a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(
    q, positions, acc, peak, mass, start, end,
    kv, keys, values, table, block_stride, scale, cap, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Folds keys ``[start, end)`` into (acc, peak, mass). Without MASKED all of them are seen by all rows."""
    dims = tl.arange(0, DIM)
    for first in range(start, end, TILE):
        key = first + tl.arange(0, TILE)
        valid = key < end
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=valid, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        places = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * HEAD_DIM
        places = places[:, None] + dims[None, :]
        if MASKED or HEAD_DIM != DIM:
            inside = valid[:, None]
            if HEAD_DIM != DIM:
                inside = inside & (dims < HEAD_DIM)[None, :]
            k = tl.load(kv + keys + places, mask=inside, other=0.0)
            v = tl.load(kv + values + places, mask=inside, other=0.0)
        else:
            k = tl.load(kv + keys + places)
            v = tl.load(kv + values + places)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
        if MASKED:
            seen = valid[None, :] & (key[None, :] <= positions[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has a peak of -inf, and -inf - -inf is no number.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - level[:, None])
        rescale = tl.exp2(peak - level)
        mass = mass * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, mass


@triton.jit(
    do_not_specialize=["num_queries", "layer", "num_splits", "num_kv_heads", "table_stride", "window"],
    do_not_specialize_on_alignment=["members", "query_start_loc", "seq_lens", "tables"],
)
def decode_kernel(
    query, kv, output, partials, stats, members, query_start_loc, seq_lens, tables,
    num_queries, layer, num_splits, num_kv_heads, table_stride, query_stride, block_stride, scale, cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ALL: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Few queries per request: programs (request, KV head, split of its keys).

    With SPLIT a program leaves its sums to ``combine_kernel``. Without ALL ``members`` are the requests to take.
    """
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = item
    if not ALL:
        request = tl.load(members + item)
    start_row = tl.load(query_start_loc + request)
    length = (tl.load(query_start_loc + request + 1) - start_row).to(tl.int32)
    context = tl.load(seq_lens + request).to(tl.int32)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    heads = head * GROUP + rows % GROUP
    used = rows // GROUP < length
    cells = used[:, None] & (dims < HEAD_DIM)[None, :]
    places = (start_row + rows // GROUP) * query_stride + heads * HEAD_DIM
    q = tl.load(query + places[:, None] + dims[None, :], mask=cells, other=0.0)
    positions = context - length + rows // GROUP

    low = 0
    if WINDOW:
        low = tl.maximum(context - length + 1 - window, 0) // TILE * TILE
    share = tl.cdiv(tl.cdiv(context - low, num_splits), TILE) * TILE
    start = low + split * share
    end = tl.minimum(start + share, context)
    keys = ((layer * 2).to(tl.int64) * num_kv_heads + head) * (BLOCK_SIZE * HEAD_DIM)
    acc, peak, mass = _attend(
        q, positions, tl.zeros([ROWS, DIM], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32), start, end,
        kv, keys, keys + num_kv_heads * BLOCK_SIZE * HEAD_DIM, tables + request.to(tl.int64) * table_stride,
        block_stride, scale, cap, window, HEAD_DIM, DIM, BLOCK_SIZE, TILE, True, WINDOW, CAP,
    )  # fmt: skip
    num_heads = num_kv_heads * GROUP
    if SPLIT:
        place = ((item * num_queries + rows // GROUP).to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(stats + place * 2, peak, mask=used)
        tl.store(stats + place * 2 + 1, mass, mask=used)
        if start < end:
            tl.store(partials + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=cells)
    else:
        place = (start_row + rows // GROUP) * num_heads + heads
        result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(output + place[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), mask=cells)


@triton.jit(
    do_not_specialize=["num_queries", "num_splits", "num_heads"],
    do_not_specialize_on_alignment=["members", "query_start_loc"],
)
def combine_kernel(
    partials, stats, output, members, query_start_loc, num_queries, num_splits, num_heads,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MAX_SPLITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Adds what the splits of ``decode_kernel`` found: programs (request × queries, query head)."""
    item, head = tl.program_id(0), tl.program_id(1)
    request = item // num_queries
    if not ALL:
        request = tl.load(members + request)
    start_row = tl.load(query_start_loc + request)
    row = start_row + item % num_queries
    if row < tl.load(query_start_loc + request + 1):
        splits = tl.arange(0, MAX_SPLITS)
        dims = tl.arange(0, DIM)
        place = (item.to(tl.int64) * num_heads + head) * num_splits + splits
        peak = tl.load(stats + place * 2, mask=splits < num_splits, other=float("-inf"))
        found = peak > float("-inf")
        mass = tl.load(stats + place * 2 + 1, mask=found, other=0.0)
        weight = tl.where(found, tl.exp2(peak - tl.max(peak, 0)), 0.0)
        cells = found[:, None] & (dims < HEAD_DIM)[None, :]
        acc = tl.load(partials + place[:, None] * HEAD_DIM + dims[None, :], mask=cells, other=0.0)
        result = tl.sum(acc * weight[:, None], 0) / tl.sum(mass * weight, 0)
        place = (row * num_heads + head) * HEAD_DIM
        tl.store(output + place + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["layer", "num_kv_heads", "table_stride", "window"],
    do_not_specialize_on_alignment=["tiles", "query_start_loc", "seq_lens", "tables"],
)
def prefill_kernel(
    query, kv, output, tiles, query_start_loc, seq_lens, tables,
    layer, num_kv_heads, table_stride, query_stride, block_stride, scale, cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Many queries per request: programs (tile of queries, KV head). ``tiles`` [tiles, 2]: request, first query."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1)
    start_row = tl.load(query_start_loc + request)
    length = (tl.load(query_start_loc + request + 1) - start_row).to(tl.int32)
    context = tl.load(seq_lens + request).to(tl.int32)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    # Rows beyond the last whole group, or the last query, repeat one; they are not stored.
    index = first + rows // GROUP
    used = (rows < ROWS // GROUP * GROUP) & (index < length)
    index = tl.where(used, index, first)
    heads = head * GROUP + rows % GROUP
    cells = used[:, None] & (dims < HEAD_DIM)[None, :]
    places = (start_row + index) * query_stride + heads * HEAD_DIM
    q = tl.load(query + places[:, None] + dims[None, :], mask=cells, other=0.0)
    positions = context - length + index

    low_position = context - length + first
    end = tl.minimum(low_position + ROWS // GROUP, context)
    table = tables + request.to(tl.int64) * table_stride
    keys = ((layer * 2).to(tl.int64) * num_kv_heads + head) * (BLOCK_SIZE * HEAD_DIM)
    values = keys + num_kv_heads * BLOCK_SIZE * HEAD_DIM
    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if WINDOW:
        start = tl.maximum(low_position + 1 - window, 0) // TILE * TILE
    else:
        start = (low_position + 1) // TILE * TILE
        acc, peak, mass = _attend(
            q, positions, acc, peak, mass, 0, start, kv, keys, values, table,
            block_stride, scale, cap, window, HEAD_DIM, DIM, BLOCK_SIZE, TILE, False, WINDOW, CAP,
        )  # fmt: skip
    acc, peak, mass = _attend(
        q, positions, acc, peak, mass, start, end, kv, keys, values, table,
        block_stride, scale, cap, window, HEAD_DIM, DIM, BLOCK_SIZE, TILE, True, WINDOW, CAP,
    )  # fmt: skip
    result = acc / mass[:, None]
    place = (start_row + index) * (num_kv_heads * GROUP) + heads
    tl.store(output + place[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), mask=cells)
