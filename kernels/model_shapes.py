"""Shapes of published models, and the operator calls of one layer on them: what is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from twinpool.kernels.interface import AttentionBatch, Kernels
from twinpool.kernels.row_sampling import RowSampler


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one layer; ``experts`` and ``chosen`` where its MLP is a mixture, ``inner`` that of one expert."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    gelu: bool = False
    head_norms: bool = False
    float_norms: bool = False
    experts: int = 0
    chosen: int = 0
    vocab: int = 128256


MODELS = (
    ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64, vocab=49152),
    ModelShape("Llama-3.2-1B", 2048, 8192, 32, 8, 64),
    ModelShape("Llama-2-7B", 4096, 11008, 32, 32, 128, vocab=32000),
    ModelShape("Llama-3.1-8B", 4096, 14336, 32, 8, 128),
    ModelShape("Llama-3.1-70B", 8192, 28672, 64, 8, 128),
    ModelShape("Mistral-7B-v0.1", 4096, 14336, 32, 8, 128, window=4096, vocab=32000),
    ModelShape("Mixtral-8x7B", 4096, 14336, 32, 8, 128, experts=8, chosen=2, vocab=32000),
    ModelShape("Qwen2.5-0.5B", 896, 4864, 14, 2, 64, vocab=151936),
    ModelShape("Qwen2.5-7B", 3584, 18944, 28, 4, 128, vocab=152064),
    ModelShape("Qwen3-32B", 5120, 25600, 64, 8, 128, head_norms=True, vocab=151936),
    ModelShape("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, head_norms=True, experts=128, chosen=8, vocab=151936),
    ModelShape("Gemma-3-1B", 1152, 6912, 4, 1, 256, 512, None, True, True, True, vocab=262144),
    ModelShape("Gemma-3-4B", 2560, 10240, 8, 4, 256, None, None, True, True, True, vocab=262208),
    ModelShape("Gemma-2-9B", 3584, 14336, 16, 8, 256, 4096, 50.0, True, False, True, vocab=256000),
)
"""Every family, head size, group and window that the engine loads; Gemma 2 for the soft cap."""


def run_layer(kernels: Kernels, shape: ModelShape, dtype: torch.dtype, batch: AttentionBatch, num_blocks: int) -> None:
    """Calls each operator of one layer as ``engine.layers`` does, on tensors of the batch's device without content."""
    device = batch.seq_lens.device
    tokens, heads, kv_heads, dim = sum(batch.query_lens), shape.heads, shape.kv_heads, shape.head_dim

    def tensor(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    norm_dtype = torch.float32 if shape.float_norms else dtype
    x, weight = tensor(tokens, shape.hidden), tensor(shape.hidden, dtype=norm_dtype)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, tensor(tokens, shape.hidden), weight, 1e-6)
    qkv = tensor(tokens, heads + 2 * kv_heads, dim)
    query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if shape.head_norms:
        head_weight = tensor(dim, dtype=norm_dtype)
        parts = (kernels.rms_norm(query_key[:, a:b], head_weight, 1e-6) for a, b in ((0, heads), (heads, None)))
        query_key = torch.cat(tuple(parts), dim=1)
    kv = tensor(num_blocks, 2, 2, kv_heads, 16, dim)
    cos, sin = tensor(tokens, dim // 2), tensor(tokens, dim // 2)
    query_key = kernels.rotary_write(query_key, value, cos, sin, kv, 1, batch.slot_mapping)
    query, key = query_key[:, :heads], query_key[:, heads:]
    attend = kernels.attention(batch, kv)
    attend(query, key, value, kv, 1, scale=dim**-0.5, window=shape.window, soft_cap=shape.soft_cap)
    if shape.experts:
        logits = tensor(tokens, shape.experts)
        ids, weights = kernels.route(logits, shape.chosen, normalise=True)
        gate_up, down = (
            tensor(shape.experts, 2 * shape.inner, shape.hidden),
            tensor(shape.experts, shape.hidden, shape.inner),
        )
        kernels.experts(gate_up, down)(x, ids, weights)
    else:
        activation = kernels.gelu_tanh_mul if shape.gelu else kernels.silu_mul
        activation(tensor(tokens, 2 * shape.inner))


def batch_of(lengths: list[int], context: int, device: torch.device) -> AttentionBatch:
    """Requests with ``lengths`` queries each and ``context`` keys; tensors without content."""

    def integers(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int64, device=device)

    blocks = -(-context // 16)
    count = len(lengths)
    return AttentionBatch(
        slot_mapping=integers(sum(lengths)),
        block_tables=integers(count, blocks),
        query_start_loc=integers(count + 1),
        seq_lens=integers(count),
        query_lens=lengths,
        context_lens=[context] * count,
    )


def run_sampling(sample: RowSampler, shape: ModelShape, device: torch.device) -> None:
    """One draw for each of two rows."""
    sample(torch.empty((2, shape.vocab), dtype=torch.float32, device=device), np.zeros((2, 5)))
