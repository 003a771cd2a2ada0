"""Two ranks in two threads: the sharded layers add up to the whole model, each rank with its heads' KV."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiny_models import FAMILIES
from twinpool.engine.batch import BatchBuilder
from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.loader import load
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models import registry
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.plan import ScheduledRequest
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.engine.runner import ModelRunner
from twinpool.kernels.reference import ReferenceKernels
from twinpool.kv_transfer.layout import KVLayout, RankLayout

CPU = torch.device("cpu")


class Exchange:
    """Gives every rank the tensors of all ranks, in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def swap(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = x
        self._barrier.wait()
        parts = [part.clone() for part in self._parts]
        self._barrier.wait()
        return parts


class ThreadCollective:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange.swap(self._rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange.swap(self._rank, x), dim=-1)


@torch.inference_mode()
def run_rank(folder, prompt, parallel):
    """Prefills in two chunks; returns logits of all rows of the second, and the KV blocks."""
    config, checkpoint, kernels = ModelConfig.from_hf(folder), Checkpoint.open(folder), ReferenceKernels(prepack=False)
    family = registry.FAMILIES[config.architecture]
    model = load(
        checkpoint,
        lambda weights: family(weights, config, ParallelContext(), kernels),
        lambda weights: family(weights, config, parallel, kernels),
        dtype=torch.float32,
        device=CPU,
    ).model
    heads = parallel.kv_heads(config.num_kv_heads)
    layout = RankLayout(
        KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 8, "float32"), 0, config.num_layers, *heads
    )
    runner = ModelRunner(model, KVCache(torch.zeros(8 * layout.block_bytes, dtype=torch.uint8), layout), CPU)
    request = Request(1, prompt, SamplingParams(), StopParams(1), block_ids=[3, 1, 6])
    builder = BatchBuilder(block_size=8, num_blocks=8, vocab_size=config.vocab_size)
    for num_tokens in (11, len(prompt) - 11):
        scheduled = [ScheduledRequest(request, num_tokens, False)]
        batch = builder.build(scheduled).on(CPU)
        hidden = runner.forward(batch)
        request.num_computed_tokens += num_tokens
    return runner.logits(hidden), runner.cache.blocks


def check(folder, prompt):
    logits, blocks = run_rank(folder, prompt, ParallelContext())
    exchange = Exchange(2)
    ranks = [ParallelContext(rank, 2, collective=ThreadCollective(exchange, rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda parallel: run_rank(folder, prompt, parallel), ranks))
    for rank, (rank_logits, rank_blocks) in enumerate(parts):
        torch.testing.assert_close(rank_logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rank_blocks, blocks[:, :, :, rank : rank + 1], rtol=1e-4, atol=1e-4)


def test_two_ranks_are_one_model(tmp_path, make_tiny_llama, random_prompt):
    check(make_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True), random_prompt(20))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_one_model_of_any_family(family, tmp_path, make_tiny_model, random_prompt):
    check(make_tiny_model(family, tmp_path), random_prompt(20))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_two_ranks_split_fused_experts(family, tmp_path, make_tiny_model, random_prompt):
    check(make_tiny_model(family, tmp_path, expert_layout="fused"), random_prompt(20))
