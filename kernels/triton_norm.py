# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code of the RMS norm, alone or with the addition of the residual stream before it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads"])
def rms_norm_kernel(
    x, residual, weight, output, eps, row_stride, head_stride, heads, size,
    WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Programs (row × head). With ADD ``residual`` (contiguous, one head) becomes the sum, which is normalised."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    place = program // heads * row_stride + program % heads * head_stride + columns
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + program * size + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + program * size + columns, value, mask=inside)
    value = value.to(tl.float32)
    normal = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0)
    normal = normal.to(weight.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)
    tl.store(output + program * size + columns, normal.to(output.dtype.element_ty), mask=inside)
