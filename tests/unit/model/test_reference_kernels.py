from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from twinpool.kernels.interface import AttentionBatch
from twinpool.kernels.onednn import WIDE_ROWS, OneDnnLinear, can_prepack
from twinpool.kernels.reference import ReferenceKernels

BLOCK = 4
DIM = 8


def dense(q, k, v, scale, window, soft_cap):
    """Attention of one sequence, written as the definition says: q [L, H, D] are the last of the keys [S, G, D]."""
    length, total = q.shape[0], k.shape[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    output = torch.zeros_like(q)
    for row in range(length):
        position = total - length + row
        first = 0 if window is None else max(0, position - window + 1)
        scores = torch.einsum("hd,shd->hs", q[row], k[first : position + 1]) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        output[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v[first : position + 1])
    return output


class Case:
    """Random sequences in a region full of NaN, each in blocks of its own, placed by ``order``."""

    def __init__(self, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int, order: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.queries = [torch.randn(q, heads, DIM, generator=generator) for q, _ in lengths]
        self.keys = [torch.randn(c, kv_heads, DIM, generator=generator) for _, c in lengths]
        self.values = [torch.randn(c, kv_heads, DIM, generator=generator) for _, c in lengths]
        self.kv = torch.full((max(order) + 1, 2, 2, kv_heads, BLOCK, DIM), float("nan"))
        self.kv[0] = 0
        tables, free = [], list(order)
        for _, context in lengths:
            count = -(-context // BLOCK)
            tables.append(free[:count])
            free = free[count:]
        width = max(map(len, tables))
        query_lens = [q for q, _ in lengths]
        context_lens = [c for _, c in lengths]
        slots = []
        kernels = ReferenceKernels(prepack=False)
        for table, (queries, context), key, value in zip(tables, lengths, self.keys, self.values, strict=True):
            self.kv[table] = 0
            slot = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)])
            kernels.write_kv(key, value, self.kv, 1, slot)
            slots.append(slot[context - queries :])
        self.batch = AttentionBatch(
            slot_mapping=torch.cat(slots),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0),
            seq_lens=torch.tensor(context_lens),
            query_lens=query_lens,
            context_lens=context_lens,
        )

    def run(self, window: int | None, soft_cap: float | None) -> torch.Tensor:
        attend = ReferenceKernels(prepack=False).attention(self.batch, self.kv)
        key = torch.cat([k[c - q :] for k, (q, c) in zip(self.keys, self.lengths, strict=True)])
        value = torch.cat([v[c - q :] for v, (q, c) in zip(self.values, self.lengths, strict=True)])
        query = torch.cat(self.queries)
        return attend(query, key, value, self.kv, 1, scale=0.3, window=window, soft_cap=soft_cap)

    def expected(self, window: int | None, soft_cap: float | None) -> torch.Tensor:
        each = zip(self.queries, self.keys, self.values, strict=True)
        return torch.cat([dense(q, k, v, 0.3, window, soft_cap) for q, k, v in each])


MIXED = [(1, 9), (7, 7), (1, 70), (1, 1), (3, 11), (20, 45), (3, 3), (1, 130), (17, 17), (3, 12)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 6, 21, 64])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("lengths", [MIXED, [(1, 5), (1, 7)], [(6, 6)]], ids=["mixed", "decode", "prefill"])
def test_paged_attention_is_dense_attention(heads, kv_heads, window, soft_cap, lengths):
    case = Case(lengths, heads, kv_heads, range(1, 100))
    torch.testing.assert_close(case.run(window, soft_cap), case.expected(window, soft_cap), rtol=1e-5, atol=1e-5)


def test_block_placement_changes_nothing():
    order = torch.randperm(99, generator=torch.Generator().manual_seed(3)) + 1
    straight, shuffled = Case(MIXED, 4, 2, range(1, 100)), Case(MIXED, 4, 2, order.tolist())
    assert torch.equal(straight.run(None, None), shuffled.run(None, None))


def test_write_kv_touches_only_its_slots():
    kv = torch.full((5, 2, 2, 3, BLOCK, DIM), -1.0)
    key, value = torch.randn(3, 3, DIM), torch.randn(3, 3, DIM)
    ReferenceKernels(prepack=False).write_kv(key, value, kv, 1, torch.tensor([7, 16, 2]))
    for row, (block, offset) in enumerate(((1, 3), (4, 0), (0, 2))):
        assert torch.equal(kv[block, 1, 0, :, offset], key[row])
        assert torch.equal(kv[block, 1, 1, :, offset], value[row])
        kv[block, 1, :, :, offset] = -1.0
    assert (kv == -1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_operators(dtype):
    kernels = ReferenceKernels(prepack=False)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    x, residual, weight = torch.randn(5, 16).to(dtype), torch.randn(5, 16).to(dtype), torch.randn(16).to(dtype)
    total = x + residual
    normed, added = kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    expected = F.rms_norm(total.double(), (16,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), expected, **tolerance)
    torch.testing.assert_close(added, total)
    torch.testing.assert_close(kernels.rms_norm(total, weight, 1e-5), normed)
    gate, up = x[:, :8].double(), x[:, 8:].double()
    torch.testing.assert_close(kernels.silu_mul(x).double(), gate * torch.sigmoid(gate) * up, **tolerance)
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(kernels.gelu_tanh_mul(x).double(), gelu * up, **tolerance)


def test_a_float32_weight_of_a_norm_is_rounded_once():
    kernels = ReferenceKernels(prepack=False)
    x, weight = torch.randn(50, 16).bfloat16(), 1 + torch.randn(16)
    normed = kernels.rms_norm(x, weight, 1e-5)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, F.rms_norm(x.float(), (16,), weight, 1e-5).bfloat16())


@pytest.mark.parametrize("normalise", [False, True])
def test_routing_takes_the_likeliest_experts(normalise):
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 4.0]])
    ids, weights = ReferenceKernels(prepack=False).route(logits.bfloat16(), 2, normalise=normalise)
    assert ids[0].tolist() == [1, 2]
    assert ids[1].tolist() == [3, 0]
    assert weights.dtype == torch.float32
    expected = logits.softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)


@pytest.mark.parametrize("num_chosen", [1, 3, 5])
def test_experts_add_up_whatever_the_batch(num_chosen):
    kernels = ReferenceKernels(prepack=False)
    gate_up, down, x = torch.randn(5, 12, 8), torch.randn(5, 8, 6), torch.randn(9, 8)
    experts = kernels.experts(gate_up, down)
    ids = torch.stack([torch.randperm(5)[:num_chosen] for _ in range(9)])
    weights = torch.rand(9, num_chosen)
    result = experts(x, ids, weights)
    for row in range(9):
        expected = sum(
            weight * (down[expert] @ kernels.silu_mul(gate_up[expert] @ x[row]))
            for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True)
        )
        torch.testing.assert_close(result[row], expected, rtol=1e-4, atol=1e-4)
        alone = experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])[0]
        torch.testing.assert_close(alone, result[row])


def test_rotary_turns_pairs_by_the_angle():
    angles = torch.tensor([[0.3, 1.1], [2.0, -0.4]])
    x = torch.randn(2, 3, 4)
    rotated = ReferenceKernels(prepack=False).rotary(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones(2, 1, 2), angles[:, None])
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("rows", [1, 3, 16, 70, WIDE_ROWS, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widen", [False, True])
def test_packed_linear_equals_linear(rows, bias, widen):
    weight = torch.randn(96, 64).bfloat16()
    if not can_prepack(weight):
        pytest.skip("oneDNN has no bfloat16 on this machine")
    offset = torch.randn(96).bfloat16() if bias else None
    x = torch.randn(rows, 64).bfloat16()
    expected = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
    output = OneDnnLinear(weight, offset, widen=widen)(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=5e-2)


def test_float32_is_never_packed():
    assert not can_prepack(torch.randn(4, 4))
