"""A mixture of experts: a router sends each token to a few gated MLPs and adds what they return, weighted.

Every TP rank holds a slice of each expert, and the whole router, so that all ranks choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinpool.engine.layers import Columns, column_parallel
from twinpool.engine.loader import Shard, Weights
from twinpool.engine.model_config import ExpertConfig, ModelConfig
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Experts, Kernels, Linear


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's published checkpoints call the router's block, and the three matrices of one expert in it."""

    block: str
    gate: str
    up: str
    down: str


FUSED_BLOCK = "mlp"
"""Where ``transformers`` 5 keeps the block of every family when it stores ``experts.gate_up_proj``, all in one."""


class SparseMLP:
    """Router and experts of one layer."""

    def __init__(
        self, router: Linear, experts: Experts, config: ExpertConfig, parallel: ParallelContext, kernels: Kernels
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_chosen = config.num_chosen
        self._normalise = config.normalise
        self._collective = parallel.collective
        self._kernels = kernels

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: ExpertNames,
        config: ModelConfig,
        experts: ExpertConfig,
        parallel: ParallelContext,
        kernels: Kernels,
    ) -> SparseMLP:
        """Loads router and experts of the layer ``weights``: one matrix per expert, or all of them fused in two."""
        part = parallel.shard(experts.intermediate_size, "intermediate size of experts")
        fused = weights.at(FUSED_BLOCK)
        if fused.has("experts.gate_up_proj"):
            block = fused
            gate_up, down = _load_fused(block.at("experts"), config.hidden_size, experts, part)
        else:
            block = weights.at(names.block)
            gate_up, down = _load_single(block.at("experts"), names, config.hidden_size, experts, part)
        columns = (Columns("gate", experts.num_experts, 0, experts.num_experts),)
        router = column_parallel(block, columns, config.hidden_size, bias=False, kernels=kernels)
        return cls(router, kernels.experts(gate_up, down), experts, parallel, kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, equal on all ranks."""
        ids, weights = self._kernels.route(self._router(x), self._num_chosen, normalise=self._normalise)
        return self._collective.all_reduce(self._experts(x, ids, weights))


def _load_fused(
    weights: Weights, hidden: int, config: ExpertConfig, part: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    count, inner = config.num_experts, config.intermediate_size
    gate_up = weights.take("gate_up_proj", (count, 2 * inner, hidden), Shard(1, *part, parts=2))
    return gate_up, weights.take("down_proj", (count, hidden, inner), Shard(2, *part))


def _load_single(
    weights: Weights, names: ExpertNames, hidden: int, config: ExpertConfig, part: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    inner, size = config.intermediate_size, part[1] - part[0]
    first = weights.at("0").take(f"{names.gate}.weight", (inner, hidden), Shard(0, *part))
    all_gate_up = first.new_empty((config.num_experts, 2 * size, hidden))
    all_down = first.new_empty((config.num_experts, hidden, size))
    for index in range(config.num_experts):
        expert = weights.at(str(index))
        gate = first if index == 0 else expert.take(f"{names.gate}.weight", (inner, hidden), Shard(0, *part))
        all_gate_up[index, :size] = gate
        all_gate_up[index, size:] = expert.take(f"{names.up}.weight", (inner, hidden), Shard(0, *part))
        all_down[index] = expert.take(f"{names.down}.weight", (hidden, inner), Shard(1, *part))
    return all_gate_up, all_down
