# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code without reductions: gated activations, rotary embedding, the write of keys and values to their slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_kernel(gate_up, output, size, WIDTH: tl.constexpr, GELU: tl.constexpr):
    """``act(gate) * up``: programs (row, part of the columns). The activation is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 · (1 + tanh(u)) is the sigmoid of 2u.
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    active = active.to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * size + columns, (active * up).to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer", "num_heads", "num_kv_heads"], do_not_specialize_on_alignment=["slot_mapping"])
def rotary_write_kernel(
    query_key, value, cos, sin, output, kv, slot_mapping,
    layer, row_stride, head_stride, value_row_stride, value_head_stride, block_stride, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotates queries and keys, writes keys and values to their slots: programs (row, part of all heads).

    Heads are numbered queries, keys, values. In the KV region a layer's value heads follow its key heads.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    inside = (half < HEAD_DIM // 2)[None, :]
    rotated = (heads < num_heads + num_kv_heads)[:, None]
    copied = (heads >= num_heads + num_kv_heads)[:, None] & (heads < num_heads + 2 * num_kv_heads)[:, None] & inside

    source = query_key + (row * row_stride + heads * head_stride)[:, None] + half[None, :]
    x1 = tl.load(source, mask=rotated & inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HEAD_DIM // 2, mask=rotated & inside, other=0.0).to(tl.float32)
    angle = row * (HEAD_DIM // 2) + half
    c = tl.load(cos + angle, mask=half < HEAD_DIM // 2, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=half < HEAD_DIM // 2, other=0.0).to(tl.float32)[None, :]
    dtype = output.dtype.element_ty
    y1 = (x1 * c - x2 * s).to(dtype)
    y2 = (x2 * c + x1 * s).to(dtype)
    target = output + ((row * (num_heads + num_kv_heads) + heads) * HEAD_DIM)[:, None] + half[None, :]
    tl.store(target, y1, mask=rotated & inside)
    tl.store(target + HEAD_DIM // 2, y2, mask=rotated & inside)

    value_heads = heads - (num_heads + num_kv_heads)
    source = value + (row * value_row_stride + value_heads * value_head_stride)[:, None] + half[None, :]
    y1 = tl.where(rotated, y1, tl.load(source, mask=copied, other=0.0))
    y2 = tl.where(rotated, y2, tl.load(source + HEAD_DIM // 2, mask=copied, other=0.0))
    slot = tl.load(slot_mapping + row)
    layer_start = (layer * 2).to(tl.int64) * (num_kv_heads * BLOCK_SIZE * HEAD_DIM)
    place = slot // BLOCK_SIZE * block_stride + layer_start + slot % BLOCK_SIZE * HEAD_DIM
    target = kv + (place + (heads - num_heads) * (BLOCK_SIZE * HEAD_DIM))[:, None] + half[None, :]
    written = (heads >= num_heads)[:, None] & (heads < num_heads + 2 * num_kv_heads)[:, None] & inside
    tl.store(target, y1, mask=written)
    tl.store(target + HEAD_DIM // 2, y2, mask=written)
