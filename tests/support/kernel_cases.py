"""The contract of ``Kernels``: any implementation against the torch reference, on shapes that a case names.

Every check raises an AssertionError that says what differs. They run on CPU tensors (Triton's interpreter) and on GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twinpool.engine.distribution import Filters, scaled, truncate
from twinpool.kernels.interface import AttentionBatch, Kernels
from twinpool.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
REFERENCE = ReferenceKernels(prepack=False)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Equal within the rounding of ``actual``'s dtype; ``scale`` for results that add up many roundings."""
    assert actual.dtype == expected.dtype
    limit = TOLERANCE[actual.dtype] * scale
    torch.testing.assert_close(actual.cpu().float(), expected.cpu().float(), rtol=limit, atol=limit)


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal numbers that do not depend on the device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A step over paged KV: (queries, context) of each request, and the geometry of heads and blocks."""

    requests: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    layers: int = 2
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        requests = ",".join(f"{q}/{c}" for q, c in self.requests[:4])
        extras = f"-w{self.window}" * (self.window is not None) + f"-c{self.soft_cap}" * (self.soft_cap is not None)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{requests}-h{self.heads}:{self.kv_heads}-d{self.head_dim}-b{self.block_size}-{dtype}{extras}"

    def batch(self, device: torch.device = CPU) -> tuple[AttentionBatch, int]:
        """The batch, with blocks in no order, and the number of blocks of the region."""
        counts = [-(-context // self.block_size) for _, context in self.requests]
        num_blocks = sum(counts) + 2
        ids = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        tables = torch.zeros((len(counts), max(counts) + 1), dtype=torch.int64)
        slots: list[int] = []
        for row, ((queries, context), count) in enumerate(zip(self.requests, counts, strict=True)):
            blocks, ids = ids[:count], ids[count:]
            tables[row, :count] = torch.tensor(blocks)
            for position in range(context - queries, context):
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
        lens = [queries for queries, _ in self.requests]
        contexts = [context for _, context in self.requests]
        return (
            AttentionBatch(
                slot_mapping=torch.tensor(slots).to(device),
                block_tables=tables.to(device),
                query_start_loc=torch.tensor([0, *itertools.accumulate(lens)]).to(device),
                seq_lens=torch.tensor(contexts).to(device),
                query_lens=lens,
                context_lens=contexts,
            ),
            num_blocks,
        )


def check_attention(kernels: Kernels, case: AttentionCase, device: torch.device = CPU) -> None:
    """Write of the step's KV, then attention over it; slots that hold nothing yet are NaN and must not be seen."""
    batch, num_blocks = case.batch(device)
    tokens = sum(batch.query_lens)
    shape = (num_blocks, case.layers, 2, case.kv_heads, case.block_size, case.head_dim)
    whole = randn(*shape, dtype=case.dtype, device=CPU)
    # The projections of a step are one tensor: queries, keys and values are strided views of it, as in the models.
    qkv = randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim, dtype=case.dtype, device=CPU)
    query_key, value = qkv[:, : case.heads + case.kv_heads], qkv[:, case.heads + case.kv_heads :]
    angles = randn(tokens, case.head_dim // 2, dtype=torch.float32, device=CPU)
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    layer = case.layers - 1
    cpu_batch, _ = case.batch()
    expected_kv = whole.float()
    expected_rotated = REFERENCE.rotary_write(
        query_key.float(), value.float(), cos.float(), sin.float(), expected_kv, layer, cpu_batch.slot_mapping
    )
    kv, on_device = whole.to(device), qkv.to(device)
    rotated = kernels.rotary_write(
        on_device[:, : case.heads + case.kv_heads],
        on_device[:, case.heads + case.kv_heads :],
        cos.to(device),
        sin.to(device),
        kv,
        layer,
        batch.slot_mapping,
    )
    close(rotated, expected_rotated.to(case.dtype))
    close(kv, expected_kv.to(case.dtype))
    assert not ((kv.cpu() != whole) & (expected_kv == whole.float())).any(), "a slot of others was written"

    query, key = rotated[:, : case.heads], rotated[:, case.heads :]
    value = on_device[:, case.heads + case.kv_heads :]
    options = {"scale": case.head_dim**-0.5 * 1.3, "window": case.window, "soft_cap": case.soft_cap}
    on_cpu = [x.cpu().float() for x in (query, key, value, kv)]
    expected = REFERENCE.attention(cpu_batch, on_cpu[3])(*on_cpu, layer, **options)
    seen = torch.zeros((num_blocks, case.block_size), dtype=torch.bool)
    for row, (_, context) in enumerate(case.requests):
        positions = torch.arange(context)
        seen[cpu_batch.block_tables[row][positions // case.block_size], positions % case.block_size] = True
    kv.masked_fill_(~seen.to(device)[:, None, None, None, :, None], float("nan"))
    actual = kernels.attention(batch, kv)(query, key, value, kv, layer, **options)
    assert actual.shape == query.shape
    close(actual, expected.to(case.dtype))


def check_norms(kernels: Kernels, size: int, dtype: torch.dtype, weight_dtype: torch.dtype, device=CPU) -> None:
    """Alone, with a residual, and over heads that are a strided view."""
    weight = 1 + 0.2 * randn(size, dtype=weight_dtype, device=device)
    x, residual = randn(5, size, dtype=dtype, device=device), randn(5, size, dtype=dtype, device=device, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.cpu(), weight.cpu(), 1e-5))
    expected = REFERENCE.add_rms_norm(x.cpu(), residual.cpu().clone(), weight.cpu(), 1e-5)
    actual = kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    close(actual[0], expected[0])
    assert torch.equal(actual[1].cpu(), expected[1]), "the sum is rounded once, in the dtype of the stream"
    heads = randn(3, 7, size, dtype=dtype, device=device)[:, 2:6]
    close(kernels.rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads.cpu(), weight.cpu(), 1e-5))


def check_gates(kernels: Kernels, size: int, dtype: torch.dtype, device=CPU) -> None:
    """Both activations, with large numbers."""
    x = 4 * randn(5, 2 * size, dtype=dtype, device=device)
    close(kernels.silu_mul(x), REFERENCE.silu_mul(x.cpu()))
    close(kernels.gelu_tanh_mul(x), REFERENCE.gelu_tanh_mul(x.cpu()), 2)


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """T tokens to ``chosen`` of ``experts``; ``hot`` sends all of them to the same."""

    tokens: int
    experts: int = 6
    chosen: int = 2
    hidden: int = 48
    inner: int = 40
    hot: bool = False
    dtype: torch.dtype = torch.float32


def check_experts(kernels: Kernels, case: ExpertCase, device: torch.device = CPU) -> None:
    """Against one dense MLP per expert; a row alone gives the same as in the batch."""
    gate_up = randn(case.experts, 2 * case.inner, case.hidden, dtype=case.dtype, device=CPU) * 0.3
    down = randn(case.experts, case.hidden, case.inner, dtype=case.dtype, device=CPU) * 0.3
    x = randn(case.tokens, case.hidden, dtype=case.dtype, device=CPU)
    logits = randn(1 if case.hot else case.tokens, case.experts, dtype=torch.float32, device=CPU).expand(
        case.tokens, -1
    )
    ids, weights = kernels.route(logits.to(device), case.chosen, normalise=True)
    expected_ids, expected_weights = REFERENCE.route(logits, case.chosen, normalise=True)
    assert torch.equal(ids.cpu(), expected_ids)
    close(weights, expected_weights)
    experts = kernels.experts(gate_up.to(device), down.to(device))
    result = experts(x.to(device), ids, weights)
    expected = REFERENCE.experts(gate_up.float(), down.float())(x.float(), expected_ids, expected_weights)
    close(result, expected.to(case.dtype), 2)
    close(experts(x[-1:].to(device), ids[-1:], weights[-1:]), result[-1:].cpu(), 2)


def check_sampling(
    sample: Callable[..., torch.Tensor], vocab: int, dtype: torch.dtype, every: int = 1, device=CPU
) -> None:
    """Combinations of filters, ties included: each token is where the CDF of the kept tokens has its uniform."""
    combinations = list(itertools.product([0.3, 1.0], [vocab, 1, 7, 60], [1.0, 0.9, 0.2], [0.0, 0.05]))[::every]
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(combinations), vocab, generator=generator) * 2).to(dtype)
    logits[::2] = (logits[::2] * 2).round() / 2  # many ties
    logits[:, 5] = float("-inf")
    u = torch.rand(len(combinations), 4, generator=generator, dtype=torch.float64)
    u[:, 0], u[:, 1] = 0.0, 1 - 2**-53
    table = torch.tensor([[t, k, p, math.log(m) if m else -math.inf] for t, k, p, m in combinations]).double()
    tokens = sample(logits.to(device), torch.cat((table, u), 1).numpy()).cpu()
    for row, (temperature, top_k, top_p, min_p) in enumerate(combinations):
        z = scaled(logits[row : row + 1].float(), torch.tensor([[temperature]]))
        filters = Filters(
            top_k=torch.tensor([[top_k]]),
            max_top_k=top_k,
            top_p=torch.tensor([[top_p]], dtype=torch.float64),
            has_top_p=top_p < 1,
            log_min_p=torch.tensor([[math.log(min_p) if min_p else -math.inf]]),
            has_min_p=min_p > 0,
        )
        kept, ids = truncate(z, filters)
        cdf = kept[0].double().exp().cumsum(0)
        ids = torch.arange(vocab) if ids is None else ids
        for token, uniform in zip(tokens[row].tolist(), u[row].tolist(), strict=True):
            place = (ids == token).nonzero()
            case = f"row {row} {combinations[row]}: token {token} for {uniform}"
            assert len(place), f"{case} was filtered out"
            index = int(place)
            low = float(cdf[index - 1]) if index else 0.0
            slack = 2e-6 * float(cdf[-1])
            assert low - slack <= uniform * float(cdf[-1]) <= float(cdf[index]) + slack, case
    greedy = torch.zeros((len(combinations), 5), dtype=torch.float64)
    best = sample(logits.to(device), greedy.numpy()).cpu()[:, 0]
    assert torch.equal(best, torch.from_numpy(logits.float().numpy().argmax(-1))), "the first of the best"
    broken = torch.full((3, vocab), float("-inf"))
    broken[1, 3], broken[2, 4] = float("nan"), float("inf")
    broken[1, 6] = 1.0
    table = torch.tensor([[1.0, vocab, 0.5, -math.inf, 0.7]] * 3, dtype=torch.float64)
    assert sample(broken.to(device), table.numpy()).flatten().tolist() == [0, 0, 0]
