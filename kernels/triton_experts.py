# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code of a mixture of experts: a matmul per expert over the rows that chose it, all in one grid; then the sum.

Rows are (token, choice) pairs sorted by expert, so that an expert's rows are one range. How many tiles an expert needs
is known on the device only: the grid is the most that any choice can need, and surplus programs return.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["divisor", "num_experts"])
def grouped_matmul_kernel(
    x, weight, output, order, ends, tile_ends, divisor, num_experts, in_size, out_size, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATHER: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """``output[i] = x[row of i] @ weight[expert of i].T``: programs (tile of rows, tile of columns).

    ``ends`` and ``tile_ends`` [experts] are prefix sums of rows and of tiles. With GATHER the row of i is
    ``order[i] // divisor``, else i.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    reached = tl.load(tile_ends + experts, mask=experts < num_experts, other=2147483647) <= tile
    expert = tl.sum(reached.to(tl.int32), 0)
    if expert < num_experts:
        before = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0) + (tile - before) * ROWS
        rows = start + tl.arange(0, ROWS)
        used = rows < tl.load(ends + expert)
        source = rows
        if GATHER:
            source = tl.load(order + rows, mask=used, other=0) // divisor
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        left = x + source.to(tl.int64)[:, None] * x_stride + depth[None, :]
        right = weight + (expert.to(tl.int64) * out_size + columns)[:, None] * in_size + depth[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, in_size, DEPTH):
            inside = first + depth < in_size
            a = tl.load(left + first, mask=used[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + first, mask=(columns < out_size)[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        target = output + rows.to(tl.int64)[:, None] * out_size + columns[None, :]
        tl.store(target, acc.to(output.dtype.element_ty), mask=used[:, None] & (columns < out_size)[None, :])


@triton.jit(do_not_specialize=["num_chosen"])
def combine_experts_kernel(
    x, places, order, weights, output, num_chosen, size, WIDTH: tl.constexpr
):  # fmt: skip
    """Adds a token's rows of ``x``, weighted, in the order of their experts: programs (token, part of the columns).

    ``places`` [tokens, choices] are the rows, ascending; ``order`` tells which choice a row came from.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    acc = tl.zeros([WIDTH], tl.float32)
    for choice in range(0, num_chosen):
        row = tl.load(places + token * num_chosen + choice)
        weight = tl.load(weights + tl.load(order + row))
        acc += weight * tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * size + columns, acc.to(output.dtype.element_ty), mask=inside)
