"""What all decoder-only families share: embeddings, a stack of layers, a final norm, logits.

A family file says how one layer is made; nothing is inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from twinpool.engine.batch import FlatBatch
from twinpool.engine.layers import Attention, Embedding, Head, RMSNorm, Rotary, Step
from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.rope import RopeParameters
from twinpool.kernels.interface import Kernels


class Layer(Protocol):
    """One decoder layer."""

    def __call__(self, step: Step) -> None:
        """Advances ``step.hidden`` and ``step.residual``, and writes the layer's KV."""


class MLP(Protocol):
    """What follows attention: one gated MLP, or several experts."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``."""


class PreNormLayer:
    """Attention and MLP, each behind a norm."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, step: Step) -> None:
        """Advances ``step.hidden`` and ``step.residual``."""
        hidden, residual = self._input_norm.add(step.hidden, step.residual)
        hidden, residual = self._mlp_norm.add(self._attention(hidden, step), residual)
        step.hidden, step.residual = self._mlp(hidden), residual


class Decoder:
    """Implements ``Model`` (see ``engine.runner``)."""

    def __init__(
        self,
        *,
        embedding: Embedding | None,
        layers: Sequence[Layer],
        norm: RMSNorm | None,
        head: Head | None,
        rotary: Rotary,
        local_rotary: Rotary | None,
        kernels: Kernels,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = rotary
        self._local_rotary = local_rotary
        self._kernels = kernels

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        parallel: ParallelContext,
        kernels: Kernels,
        make_layer: Callable[[int], Layer],
        *,
        embedding_scale: float = 1.0,
        unit_offset: bool = False,
    ) -> Decoder:
        """Loads this stage's layers through ``make_layer(model layer)``, and what else the stage holds itself."""
        model = weights.at("model")
        embedding = None
        if parallel.first_stage:
            table = model.at("embed_tokens")
            embedding = Embedding.load(table, config.vocab_size, config.hidden_size, parallel, embedding_scale)
        layers = [make_layer(layer) for layer in range(*parallel.layers(config.num_layers))]
        norm = head = None
        if parallel.last_stage:
            norm = RMSNorm.load(
                model.at("norm"), config.hidden_size, config.rms_norm_eps, kernels, unit_offset=unit_offset
            )
            head = Head.load(weights, config, embedding, parallel, kernels)

        def rotary(parameters: RopeParameters) -> Rotary:
            return Rotary(parameters, config.head_dim, weights.device, weights.dtype)

        return cls(
            embedding=embedding,
            layers=layers,
            norm=norm,
            head=head,
            rotary=rotary(config.rope),
            local_rotary=None if config.local_rope is None else rotary(config.local_rope),
            kernels=kernels,
        )

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return len(self._layers)

    def begin(self, batch: FlatBatch, kv: torch.Tensor, hidden: torch.Tensor | None) -> Step:
        """Embeds the tokens, or takes the stream ``hidden`` of the stage before, and prepares what layers share."""
        if hidden is None:
            assert self._embedding is not None
            hidden = self._embedding(batch.input_ids)
        rotation = self._rotary(batch.positions)
        local = rotation if self._local_rotary is None else self._local_rotary(batch.positions)
        attend = self._kernels.attention(batch.attention, kv)
        return Step(batch, kv, attend, rotation, local, hidden)

    def run_layers(self, step: Step, start: int, end: int) -> None:
        """Runs layers ``[start, end)``; their KV is written (or launched to be) on return."""
        for layer in self._layers[start:end]:
            layer(step)

    def finish(self, step: Step) -> torch.Tensor:
        """``[T, hidden]``: the final hidden states, or the stream for the next stage."""
        if self._norm is None:
            return step.hidden if step.residual is None else step.hidden + step.residual
        return self._norm.add(step.hidden, step.residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] -> [rows, vocab]``, float32."""
        assert self._head is not None
        return self._head(hidden)
