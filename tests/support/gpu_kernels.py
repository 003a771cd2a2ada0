"""Kernels on a GPU: the contract, and times against torch's and against the memory's limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from gpu_report import Row, guarded
from kernel_cases import (
    AttentionCase,
    ExpertCase,
    check_attention,
    check_experts,
    check_gates,
    check_norms,
    check_sampling,
)
from triton.testing import do_bench

from twinpool.kernels.reference import ReferenceKernels
from twinpool.kernels.row_sampling import RowSampler
from twinpool.kernels.tile_tuning import tune_on
from twinpool.kernels.tiles import AttentionWorkload, Tuning
from twinpool.kernels.triton_kernels import TritonKernels

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = (
    [(1, 1), (1, 700), (1, 16)],
    [(1, 4000)],
    [(3, 90), (1, 33), (16, 16)],
    [(150, 150), (1, 40), (200, 900)],
)
SHAPES = (
    (9, 3, 64, None, None),
    (32, 8, 128, 300, None),
    (7, 1, 128, None, None),
    (4, 4, 128, None, 30.0),
    (8, 4, 256, 37, 50.0),
    (4, 2, 80, None, None),
)
"""Heads, KV heads, head size, window, soft cap."""


def contract_cases(device: torch.device) -> dict[str, list[Callable[[], None]]]:
    """Checks by operator and dtype."""
    kernels = TritonKernels.on(device)
    cases: dict[str, list[Callable[[], None]]] = {}
    for dtype in (BF16, F16, F32):
        name = str(dtype).removeprefix("torch.")
        # Each geometry is several kernels to compile; float32 is for the exact tests of small models.
        shapes = SHAPES[:2] if dtype is F32 else SHAPES
        cases[f"attention, rotary and write {name}"] = [
            partial(check_attention, kernels, AttentionCase(step, *shape, window=w, soft_cap=c, dtype=dtype), device)
            for step, (*shape, w, c) in itertools.product(STEPS, shapes)
        ]
        cases[f"norms {name}"] = [
            partial(check_norms, kernels, size, dtype, weight, device)
            for size in (64, 576, 4096, 8192)
            for weight in {dtype, F32}
        ]
        cases[f"gates {name}"] = [partial(check_gates, kernels, size, dtype, device) for size in (96, 1536, 14336)]
        cases[f"experts {name}"] = [
            partial(check_experts, kernels, ExpertCase(tokens, experts, chosen, 256, 192, hot, dtype), device)
            for tokens, (experts, chosen), hot in itertools.product((1, 17, 900), ((8, 2), (60, 4)), (False, True))
        ]
        cases[f"sampling {name}"] = [
            partial(check_sampling, RowSampler(), vocab, dtype, 1, device) for vocab in (3000, 50000)
        ]
    return cases


def contract(device: torch.device) -> list[Row]:
    """One row per operator and dtype, and one per case that fails."""
    rows: list[Row] = []
    for name, checks in contract_cases(device).items():
        failures = [row for check in checks for row in guarded(name, partial(_nothing, check))]
        rows.append(Row(name, f"{len(checks)} cases", f"{len(failures)} differ from the reference", not failures))
        rows += failures[:3]
    return rows


def _nothing(check: Callable[[], None]) -> Sequence[Row]:
    check()
    return ()


def milliseconds(run: Callable[[], object]) -> float:
    """Median, caches flushed between runs."""
    return float(do_bench(run, warmup=20, rep=80, return_mode="median"))


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and write together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def against(check: str, case: str, ours: float, torch_ms: float, limit_ms: float) -> Row:
    """Milliseconds of ours, torch's and the limit; ours should not be slower than torch's."""
    result = f"{ours:.3f} ms; torch {torch_ms:.3f}; limit {limit_ms:.3f} ({limit_ms / ours:.0%})"
    figures = {"ms": ours, "torch_ms": torch_ms, "limit_ms": limit_ms}
    return Row(check, case, result, ours <= torch_ms * 1.05, figures)


def decode_times(device: torch.device, rate: float) -> list[Row]:
    """Llama-3.1-8B's heads: paged decode attention against SDPA over dense KV, which needs no block table."""
    rows = []
    kernels = TritonKernels.on(device)
    for requests, context in ((1, 16384), (16, 576), (16, 4096), (64, 2048), (256, 1024)):
        case = AttentionCase([(1, context)] * requests, 32, 8, 128, layers=1, dtype=BF16)
        batch, blocks = case.batch(device)
        kv = torch.randn((blocks, 1, 2, 8, 16, 128), dtype=BF16, device=device)
        query = torch.randn((requests, 32, 128), dtype=BF16, device=device)
        attend = kernels.attention(batch, kv)
        call = partial(attend, query, query, query, kv, 0, scale=0.088, window=None, soft_cap=None)
        dense = torch.randn((2, requests, 8, context, 128), dtype=BF16, device=device)
        q = query.view(requests, 32, 1, 128)
        sdpa = partial(F.scaled_dot_product_attention, q, dense[0], dense[1], scale=0.088, enable_gqa=True)
        limit = requests * context * 2 * 8 * 128 * 2 / rate * 1e3
        rows.append(
            against("decode attention", f"{requests} × {context}", milliseconds(call), milliseconds(sdpa), limit)
        )
    return rows


def prefill_times(device: torch.device) -> list[Row]:
    """Causal attention of whole prompts against SDPA over dense tensors; the limit is 60 % of what a matmul reaches."""
    rows = []
    kernels = TritonKernels.on(device)
    a = torch.randn((8192, 8192), dtype=BF16, device=device)
    rate = 2 * 8192**3 / milliseconds(lambda: a @ a) * 1e3
    for prompts, length in ((1, 8192), (4, 2048), (32, 256)):
        case = AttentionCase([(length, length)] * prompts, 32, 8, 128, layers=1, dtype=BF16)
        batch, blocks = case.batch(device)
        kv = torch.randn((blocks, 1, 2, 8, 16, 128), dtype=BF16, device=device)
        query = torch.randn((prompts * length, 32, 128), dtype=BF16, device=device)
        attend = kernels.attention(batch, kv)
        call = partial(attend, query, query, query, kv, 0, scale=0.088, window=None, soft_cap=None)
        q = torch.randn((prompts, 32, length, 128), dtype=BF16, device=device)
        k = torch.randn((prompts, 8, length, 128), dtype=BF16, device=device)
        sdpa = partial(F.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True)
        ours, theirs = milliseconds(call), milliseconds(sdpa)
        limit = prompts * 2 * 32 * length**2 * 128 / (0.6 * rate) * 1e3
        rows.append(against("prefill attention", f"{prompts} × {length}", ours, theirs, limit))
    return rows


def other_times(device: torch.device, rate: float) -> list[Row]:
    """Operators beside attention, at 64 and 4,096 tokens of Llama-3.1-8B, and a mixture of Qwen3-30B-A3B's shape."""
    rows = []
    kernels, plain = TritonKernels.on(device), ReferenceKernels(prepack=False)
    for tokens in (64, 4096):
        x, stream = (torch.randn((tokens, 4096), dtype=BF16, device=device) for _ in range(2))
        weight = torch.randn(4096, dtype=BF16, device=device)
        gates = torch.randn((tokens, 28672), dtype=BF16, device=device)
        pairs = {
            "add and norm": (lambda k: k.add_rms_norm(x, stream, weight, 1e-5), 4 * x.nbytes),  # noqa: B023 - run at once
            "silu and multiply": (lambda k: k.silu_mul(gates), gates.nbytes * 3 // 2),  # noqa: B023 - run at once
        }
        for name, (call, size) in pairs.items():
            ours, theirs = milliseconds(partial(call, kernels)), milliseconds(partial(call, plain))
            rows.append(against(name, f"{tokens} tokens", ours, theirs, size / rate * 1e3))
    gate_up = torch.randn((128, 1536, 2048), dtype=BF16, device=device) * 0.02
    down = torch.randn((128, 2048, 768), dtype=BF16, device=device) * 0.02
    experts, loops = kernels.experts(gate_up, down), plain.experts(gate_up, down)
    for tokens in (16, 2048):
        x = torch.randn((tokens, 2048), dtype=BF16, device=device)
        ids, weights = kernels.route(torch.randn((tokens, 128), device=device), 8, normalise=True)
        touched = len(ids.unique()) * (gate_up[0].nbytes + down[0].nbytes) / rate * 1e3
        call, loop = partial(experts, x, ids, weights), partial(loops, x, ids, weights)
        rows.append(against("experts", f"{tokens} tokens", milliseconds(call), milliseconds(loop), touched))
    logits = torch.randn((64, 128256), device=device)
    for name, line in {"greedy": (0, 128256, 1.0), "top-p": (0.8, 128256, 0.9), "top-k, top-p": (0.8, 50, 0.9)}.items():
        parameters = np.array([[*line, -np.inf, 0.5]] * 64, dtype=np.float64)
        ours = milliseconds(partial(RowSampler(), logits, parameters))
        theirs = milliseconds(lambda: logits.sort(-1))
        rows.append(
            against(f"sampling, {name} (torch: a sort)", "64 × 128256", ours, theirs, logits.nbytes / rate * 1e3)
        )
    return rows


WORKLOADS = {
    "Llama-3.2-1B": AttentionWorkload(32, 8, 64, 16, "bfloat16", None, 64, 2048, 512),
    "Llama-3.1-8B": AttentionWorkload(32, 8, 128, 16, "bfloat16", None, 64, 2048, 512),
    "Qwen2.5-7B": AttentionWorkload(28, 4, 128, 16, "bfloat16", None, 64, 4096, 512),
    "Gemma-3-4B": AttentionWorkload(8, 4, 256, 16, "bfloat16", None, 64, 2048, 512),
}


def tuned_rows(name: str, tuning: Tuning, seconds: float) -> list[Row]:
    """The tiles that were chosen, what they gained over the defaults, and how long it took to find out."""
    rows = []
    for kernel, (default, best) in tuning.milliseconds.items():
        shape = tuning.tiles.decode if kernel == "decode" else tuning.tiles.prefill
        tile = f"{shape.rows} × {shape.keys}, {shape.warps} warps, {shape.stages} stages"
        splits = f", {tuning.tiles.programs_per_processor} programs per processor" * (kernel == "decode")
        result = f"{tile}{splits}: {best:.3f} ms; default {default:.3f} ({default / best:.2f} times)"
        rows.append(Row(f"{kernel} tile", name, result, None, {"ms": best, "default_ms": default}))
    figures = {"seconds": seconds}
    return [*rows, Row("tuning, kernels compiled", name, f"{seconds:.1f} s", tuning.whole, figures)]


def tuned(device: torch.device) -> list[Row]:
    """Attention's tiles as a worker would choose them at its first start, for one model of each head size and group."""
    rows = []
    for name, work in WORKLOADS.items():
        began = time.perf_counter()
        tuning = tune_on(device, work, time.monotonic)
        rows += tuned_rows(name, tuning, time.perf_counter() - began)
    return rows


def times(device: torch.device) -> list[Row]:
    """All of the above; each part alone, should one fail."""
    rate = bandwidth(device)
    rows = [Row("copy", "1 GiB", f"{rate / 1e9:.0f} GB/s", None, {"gb_per_s": rate / 1e9})]
    rows += guarded("decode attention", partial(decode_times, device, rate))
    rows += guarded("prefill attention", partial(prefill_times, device))
    rows += guarded("attention tiles", partial(tuned, device))
    return rows + guarded("other operators", partial(other_times, device, rate))
