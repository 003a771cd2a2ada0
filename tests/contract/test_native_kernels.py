"""The C++ kernels against the torch reference, compiled for each instruction set that this machine has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import AttentionCase, ExpertCase, check_attention, check_experts, check_gates, check_norms, randn

from twinpool.cache import cache_folder
from twinpool.kernels import native_linear
from twinpool.kernels.arena import Arena
from twinpool.kernels.native import DTYPES, NativeKernels
from twinpool.kernels.native_library import Level, load_library
from twinpool.kernels.native_linear import ROWS, NativeLinear, RowsLinear, fastest

ORDER = list(Level)
LEVELS = ORDER[: ORDER.index(Level.of_machine()) + 1]
EDGES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 31), (1, 32), (1, 33), (1, 255), (1, 256), (1, 257), (1, 600)]
CHUNKS = [(5, 5), (16, 16), (17, 40), (1, 64), (63, 63), (64, 128), (65, 200), (100, 513), (2, 9), (0, 7), (3, 300)]


@pytest.fixture(scope="session", params=LEVELS, ids=lambda level: level.name.lower())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(load_library(cache_folder(), request.param), threads=1)


@pytest.fixture(scope="session")
def threaded() -> NativeKernels:
    return NativeKernels(load_library(cache_folder(), Level.of_machine()), threads=3)


CASES = [
    *(
        AttentionCase(requests, heads, kv_heads, dim, dtype=dtype)
        for dtype in DTYPES
        for requests in (EDGES, CHUNKS)
        for heads, kv_heads, dim in [(1, 1, 64), (2, 1, 80), (6, 2, 128), (4, 1, 24), (9, 3, 64), (9, 1, 12), (7, 7, 8)]
    ),
    *(
        AttentionCase(requests, 6, 2, 64, window=window, soft_cap=soft_cap, dtype=torch.float32)
        for requests in (EDGES, CHUNKS)
        for window in (None, 1, 7, 16, 64, 300)
        for soft_cap in (None, 2.0)
    ),
    *(
        AttentionCase(EDGES + CHUNKS, 6, 2, 64, window=window, soft_cap=soft_cap, dtype=torch.bfloat16)
        for window, soft_cap in ((1, None), (7, 2.0), (300, None))
    ),
    *(
        AttentionCase(EDGES + CHUNKS, 4, 2, 64, block_size=size, window=40, dtype=dtype)
        for dtype in DTYPES
        for size in (1, 3, 4, 32, 300)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_and_rotary_write(kernels: NativeKernels, case: AttentionCase) -> None:
    check_attention(kernels, case)


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_threads_change_nothing(threaded: NativeKernels, case: AttentionCase) -> None:
    check_attention(threaded, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 80, 576, 1000])
def test_norms_and_gates(kernels: NativeKernels, size: int, dtype: torch.dtype) -> None:
    for weight_dtype in {torch.float32, dtype}:
        check_norms(kernels, size, dtype, weight_dtype)
    check_gates(kernels, size, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 16, 100, 300])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (33, 7), (64, 576), (17, 1500)])
def test_linear(kernels: NativeKernels, rows: int, columns: int, depth: int) -> None:
    weight = randn(columns, depth, dtype=torch.bfloat16, device=torch.device("cpu"))
    bias = randn(columns, dtype=torch.bfloat16, device=torch.device("cpu")) if columns != 64 else None
    x = randn(rows, depth, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    for threads in (1, 3):
        actual = NativeLinear(kernels._library, weight, bias, threads, Arena())(x)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3 * depth**0.5)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(kernels: NativeKernels, tokens: int) -> None:
    for dtype in DTYPES:
        check_experts(kernels, ExpertCase(tokens, dtype=dtype))


def test_rows_choose_the_faster_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def many(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    monkeypatch.setattr(native_linear, "_seconds", lambda layer, x: abs(x.shape[0] - (1 if layer is few else 512)))
    winners = fastest([many, few], 4)
    assert winners == (1, 1, 1, 1, 1, 0)
    chosen = RowsLinear([[many, few][winner] for winner in winners])
    assert [int(chosen(torch.zeros(rows, 4))[0, 0]) for rows in (1, 2, 256, 257, 512, 5000)] == [1, 1, 1, 2, 2, 2]
    assert len(ROWS) == len(winners)
