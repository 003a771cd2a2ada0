"""Triton kernels against the reference through Triton's interpreter; run by ``test_triton_interpreter.py``.

In float32 and float16: the interpreter multiplies bfloat16 matrices wrongly.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import (
    AttentionCase,
    ExpertCase,
    check_attention,
    check_experts,
    check_gates,
    check_norms,
    check_sampling,
)

from twinpool.kernels.row_sampling import RowSampler
from twinpool.kernels.tiles import PROGRAMS_PER_PROCESSOR, Tiles, decode_candidates, prefill_candidates
from twinpool.kernels.triton_kernels import TritonKernels

KERNELS = TritonKernels(processors=4)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

ATTENTION = [
    AttentionCase([(1, 1), (1, 37), (1, 300)]),
    AttentionCase([(1, 600), (1, 5)], heads=7, kv_heads=1, head_dim=128),
    AttentionCase([(1, 530)], heads=4, kv_heads=4, head_dim=256, window=40),
    AttentionCase([(1, 70), (4, 90), (2, 2)], heads=6, window=33, soft_cap=15.0),
    AttentionCase([(40, 40), (1, 66), (33, 150)], heads=6),
    AttentionCase([(50, 120)], heads=4, kv_heads=1, window=37, soft_cap=20.0),
    AttentionCase([(20, 20), (1, 17)], head_dim=24, block_size=4, heads=3, kv_heads=3),
    AttentionCase([(1, 40), (30, 70)], dtype=F16),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    check_attention(KERNELS, case)


STEP = [(1, 300), (1, 33), (40, 90)]


def tilings(head_dim: int) -> list[Tiles]:
    """Every candidate of both kernels for half precision, whatever the group."""
    decodes, prefills = decode_candidates(16, head_dim, 2), prefill_candidates(2, head_dim, 2)
    pairs = itertools.zip_longest(decodes, prefills, PROGRAMS_PER_PROCESSOR)
    return [Tiles(decode, prefill, programs or 1) for decode, prefill, programs in pairs]


TILINGS = [(head_dim, tiles) for head_dim in (64, 128, 256) for tiles in tilings(head_dim)]


@pytest.mark.parametrize(("head_dim", "tiles"), TILINGS[1::4], ids=str)
def test_a_sample_of_tiles(head_dim, tiles):
    check_attention(TritonKernels(4, tiles=tiles), AttentionCase(STEP, head_dim=head_dim, dtype=F16))


@pytest.mark.slow
@pytest.mark.parametrize("requests", [[(1, 16), (1, 513), (1, 31)], [(17, 49), (64, 64), (1, 17)]], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (9, 3), (7, 1)], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (24, 10.0)])
@pytest.mark.parametrize(("head_dim", "tiles"), TILINGS, ids=str)
def test_every_tile(requests, heads, head_dim, window, soft_cap, tiles):
    case = AttentionCase(requests, *heads, head_dim=head_dim, window=window, soft_cap=soft_cap, block_size=16)
    check_attention(TritonKernels(4, tiles=tiles), case)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [[(1, 16), (1, 513), (16, 31)], [(17, 49), (64, 64), (1, 17)]], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (9, 3), (7, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (24, 10.0)])
def test_attention_grid(requests, heads, head_dim, window, soft_cap):
    check_attention(
        KERNELS, AttentionCase(requests, *heads, head_dim=head_dim, window=window, soft_cap=soft_cap, block_size=16)
    )


@pytest.mark.parametrize(
    ("size", "dtype", "weight_dtype"), [(64, F32, F32), (100, F16, F32), (576, F16, F16), (96, F16, F32)]
)
def test_norms(size, dtype, weight_dtype):
    check_norms(KERNELS, size, dtype, weight_dtype)


@pytest.mark.parametrize(("size", "dtype"), [(96, F32), (1100, F32), (64, F16), (64, BF16)])
def test_gates(size, dtype):
    check_gates(KERNELS, size, dtype)


@pytest.mark.parametrize(
    "case",
    [
        ExpertCase(1),
        ExpertCase(9, experts=5, chosen=3),
        ExpertCase(70, experts=2, chosen=1, hidden=80, inner=70),
        ExpertCase(70, hot=True),
        ExpertCase(12, dtype=F16),
    ],
    ids=str,
)
def test_experts(case):
    check_experts(KERNELS, case)


@pytest.mark.parametrize(
    ("vocab", "dtype", "every"),
    [(300, F32, 7), (300, F16, 13), *(pytest.param(*x, 1, marks=pytest.mark.slow) for x in [(300, F32), (5000, F32)])],
)
def test_sampling(vocab, dtype, every):
    check_sampling(RowSampler(), vocab, dtype, every)
