"""The C++ kernels in float32: a row's bits depend neither on the rows beside it nor on the number of threads.

Compiled for each instruction set that this machine has; every comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import AttentionCase, randn

from twinpool.cache import cache_folder
from twinpool.kernels.arena import Arena
from twinpool.kernels.interface import AttentionBatch
from twinpool.kernels.native import NativeKernels
from twinpool.kernels.native_library import Level, NativeLibrary, load_library
from twinpool.kernels.native_linear import NativeLinear

CPU = torch.device("cpu")
ORDER = list(Level)
LEVELS = ORDER[: ORDER.index(Level.of_machine()) + 1]
BATCHES = (1, 2, 3, 4, 5, 7, 12, 13, 16, 100)


@pytest.fixture(scope="session", params=LEVELS, ids=lambda level: level.name.lower())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return load_library(cache_folder(), request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32, device=CPU, seed=seed)


def same_in_any_batch(operator: Callable[[NativeKernels], Callable[..., torch.Tensor]], library, *rows) -> None:
    """``operator(kernels)`` maps rows to rows; they come alone, in batches of all sizes, with one thread and two."""
    expected = None
    for threads in (1, 2):
        function = operator(NativeKernels(library, threads=threads))
        for size in BATCHES:
            parts = zip(*(x.split(size) for x in rows), strict=True)
            actual = torch.cat([function(*(x.clone() for x in part)) for part in parts])
            expected = actual if expected is None else expected
            assert torch.equal(actual, expected), f"batches of {size}, {threads} threads"


@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (33, 7), (300, 576), (97, 1500)])
def test_linear(library: NativeLibrary, columns: int, depth: int) -> None:
    weight, bias = noise(columns, depth), noise(columns)
    same_in_any_batch(lambda kernels: kernels.linear(weight, bias), library, noise(100, depth, seed=1))


def test_linear_of_bfloat16_from_one_implementation(library: NativeLibrary) -> None:
    weight, x = noise(300, 576).bfloat16(), noise(100, 576, seed=1).bfloat16()
    same_in_any_batch(lambda _: NativeLinear(library, weight, None, 1, Arena()), library, x)


@pytest.mark.parametrize("size", [7, 80, 576, 1000])
def test_norms_and_gates(library: NativeLibrary, size: int) -> None:
    weight, x, residual = noise(size), noise(100, size), noise(100, size, seed=1)
    same_in_any_batch(lambda kernels: lambda x: kernels.rms_norm(x, weight, 1e-5), library, x)
    same_in_any_batch(
        lambda kernels: lambda x, r: torch.cat(kernels.add_rms_norm(x, r, weight, 1e-5), 1), library, x, residual
    )
    gate_up = noise(100, 2 * size)
    same_in_any_batch(lambda kernels: kernels.silu_mul, library, gate_up)
    same_in_any_batch(lambda kernels: kernels.gelu_tanh_mul, library, gate_up)


def test_experts(library: NativeLibrary) -> None:
    gate_up, down = noise(6, 80, 48) * 0.3, noise(6, 48, 40) * 0.3

    def operator(kernels: NativeKernels) -> Callable[..., torch.Tensor]:
        experts = kernels.experts(gate_up, down)
        return lambda x, logits: experts(x, *kernels.route(logits, 3, normalise=True))

    same_in_any_batch(operator, library, noise(100, 48), noise(100, 6, seed=1))


SHAPES = [(1, 1, 64), (9, 3, 64), (6, 2, 128), (8, 1, 32), (2, 1, 20)]
ATTENTION = [
    *(AttentionCase([], heads, kv_heads, dim) for heads, kv_heads, dim in SHAPES),
    *(AttentionCase([], 6, 2, 64, block_size=b, window=w) for b in (1, 3, 16, 300) for w in (None, 7, 300)),
    AttentionCase([], 6, 2, 64, window=40, soft_cap=2.0),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(library: NativeLibrary, case: AttentionCase) -> None:
    """All queries of one sequence at once, and in pieces of every size, beside each other in one step."""
    length, size = 600, case.block_size
    count = -(-length // size)
    kv = noise(count + 1, 1, 2, case.kv_heads, size, case.head_dim)
    query = noise(length, case.heads, case.head_dim, seed=1)
    expected = None
    for threads in (1, 2):
        kernels = NativeKernels(library, threads=threads)
        for piece in (length, 1, 2, 3, 5, 16, 100):
            ends = [*range(piece, length, piece), length]
            starts = [0, *ends[:-1]]
            batch = AttentionBatch(
                slot_mapping=torch.arange(size, size + length),
                block_tables=torch.arange(1, count + 1).repeat(len(ends), 1),
                query_start_loc=torch.tensor([0, *ends]),
                seq_lens=torch.tensor(ends),
                query_lens=[end - start for start, end in zip(starts, ends, strict=True)],
                context_lens=ends,
            )
            options = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
            actual = kernels.attention(batch, kv)(query, query, query, kv, 0, **options)
            expected = actual if expected is None else expected
            assert torch.equal(actual, expected), f"pieces of {piece}, {threads} threads"
