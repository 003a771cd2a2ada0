"""Layers that model families compose. Code for one device; the parallel context decides which part a rank holds.

A layer loads its own parameters (``load``) and hands them to the kernels, which may repack them. Hidden states are
``[T, hidden]`` in the model's dtype; the residual stream is added by the next norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twinpool.engine.batch import FlatBatch
from twinpool.engine.loader import Shard, Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.rope import RopeParameters
from twinpool.kernels.interface import Attention as AttentionOperator
from twinpool.kernels.interface import Kernels, Linear

Activation = Callable[[torch.Tensor], torch.Tensor]
"""``[T, 2 · I] -> [T, I]``, gate first."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions, two of [T, head_dim / 2]."""


@dataclass(slots=True)
class Step:
    """State of one forward pass. ``hidden`` is what the last layer returned, ``residual`` the stream beside it.

    ``local_rotation`` is for layers with a sliding window: ``rotation``, unless they have frequencies of their own.
    """

    batch: FlatBatch
    kv: torch.Tensor
    attend: AttentionOperator
    rotation: Rotation
    local_rotation: Rotation
    hidden: torch.Tensor
    residual: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """One stored matrix of a fused column-parallel layer: ``size`` output features, of which a rank holds a range."""

    name: str
    size: int
    start: int
    end: int


def column_parallel(
    weights: Weights, columns: Sequence[Columns], in_features: int, *, bias: bool, kernels: Kernels
) -> Linear:
    """A linear layer whose outputs are this rank's columns of several matrices, one after the other."""
    parts = [weights.take(f"{c.name}.weight", (c.size, in_features), Shard(0, c.start, c.end)) for c in columns]
    biases = [weights.take(f"{c.name}.bias", (c.size,), Shard(0, c.start, c.end)) for c in columns] if bias else []
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    return kernels.linear(weight, torch.cat(biases) if bias else None)


class RowParallel:
    """A linear layer that takes this rank's range of the input features and sums over ranks."""

    def __init__(self, linear: Linear, bias: torch.Tensor | None, parallel: ParallelContext) -> None:
        self._linear = linear
        self._bias = bias
        self._collective = parallel.collective

    @classmethod
    def load(
        cls,
        weights: Weights,
        shape: tuple[int, int],
        columns: tuple[int, int],
        *,
        bias: bool,
        parallel: ParallelContext,
        kernels: Kernels,
    ) -> RowParallel:
        """Loads ``weight`` of whole ``shape`` (out, in), input features ``[columns[0], columns[1])``."""
        weight = weights.take("weight", shape, Shard(1, *columns))
        offset = weights.take("bias", (shape[0],)) if bias else None
        if parallel.tp_size == 1:
            return cls(kernels.linear(weight, offset), None, parallel)
        return cls(kernels.linear(weight, None), offset, parallel)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in of this rank] -> [T, out]``, equal on all ranks."""
        output = self._collective.all_reduce(self._linear(x))
        return output if self._bias is None else output + self._bias


class RMSNorm:
    """Root-mean-square norm, alone or with the addition of a residual."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    @classmethod
    def load(cls, weights: Weights, size: int, eps: float, kernels: Kernels, *, unit_offset: bool = False) -> RMSNorm:
        """Loads ``weight`` [size]. With ``unit_offset`` (Gemma) 1 + ``weight`` is applied, both in float32."""
        weight = weights.take("weight", (size,))
        return cls(weight.float() + 1.0 if unit_offset else weight, eps, kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of ``x + residual``, and the sum; without residual the sum is ``x``."""
        if residual is None:
            return self(x), x
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class Rotary:
    """Cosines and sines of a step's positions, computed in float32 and cast, as transformers does."""

    def __init__(self, parameters: RopeParameters, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, self._factor = parameters.frequencies(head_dim)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Takes [T]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(self._dtype), sin.to(self._dtype)


class Attention:
    """Grouped-query attention over the paged KV cache, with fused projections."""

    def __init__(
        self,
        *,
        qkv: Linear,
        output: RowParallel,
        query_norm: RMSNorm | None,
        key_norm: RMSNorm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        layer: int,
        kernels: Kernels,
    ) -> None:
        self._qkv = qkv
        self._output = output
        self._query_norm = query_norm
        self._key_norm = key_norm
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = scale
        self._window = window
        self._layer = layer
        self._kernels = kernels

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        parallel: ParallelContext,
        kernels: Kernels,
        *,
        qkv_bias: bool,
        output_bias: bool,
        head_norms: bool = False,
        unit_offset: bool = False,
    ) -> Attention:
        """Loads q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm) of model layer ``layer``: this rank's heads."""
        dim = config.head_dim
        heads = parallel.shard(config.num_heads, "number of attention heads")
        kv_heads = parallel.kv_heads(config.num_kv_heads)
        queries = (heads[0] * dim, heads[1] * dim)
        keys = (kv_heads[0] * dim, kv_heads[1] * dim)

        def head_norm(name: str) -> RMSNorm | None:
            if not head_norms:
                return None
            return RMSNorm.load(weights.at(name), dim, config.rms_norm_eps, kernels, unit_offset=unit_offset)

        columns = (
            Columns("q_proj", config.num_heads * dim, *queries),
            Columns("k_proj", config.num_kv_heads * dim, *keys),
            Columns("v_proj", config.num_kv_heads * dim, *keys),
        )
        return cls(
            qkv=column_parallel(weights, columns, config.hidden_size, bias=qkv_bias, kernels=kernels),
            output=RowParallel.load(
                weights.at("o_proj"),
                (config.hidden_size, config.num_heads * dim),
                queries,
                bias=output_bias,
                parallel=parallel,
                kernels=kernels,
            ),
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            head_dim=dim,
            scale=config.attention_scale,
            window=config.windows[layer],
            layer=layer - parallel.layers(config.num_layers)[0],
            kernels=kernels,
        )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``; writes this layer's KV of the step."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(x.shape[0], heads + 2 * kv_heads, self._head_dim)
        query_key, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if self._query_norm is not None and self._key_norm is not None:
            parts = self._query_norm(query_key[:, :heads]), self._key_norm(query_key[:, heads:])
            query_key = torch.cat(parts, dim=1)
        cos, sin = step.rotation if self._window is None else step.local_rotation
        query_key = self._kernels.rotary_write(
            query_key, value, cos, sin, step.kv, self._layer, step.batch.attention.slot_mapping
        )
        query, key = query_key.split_with_sizes((heads, kv_heads), 1)
        attended = step.attend(
            query, key, value, step.kv, self._layer, scale=self._scale, window=self._window, soft_cap=None
        )
        return self._output(attended.reshape(x.shape[0], heads * self._head_dim))


class GatedMLP:
    """``down(act(gate(x)) * up(x))``, gate and up fused."""

    def __init__(self, gate_up: Linear, down: RowParallel, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        parallel: ParallelContext,
        kernels: Kernels,
        *,
        bias: bool,
        activation: Activation | None = None,
    ) -> GatedMLP:
        """Loads gate_proj, up_proj and down_proj: this rank's inner features. ``activation`` is silu by default."""
        inner, hidden = config.intermediate_size, config.hidden_size
        part = parallel.shard(inner, "intermediate size")
        columns = (Columns("gate_proj", inner, *part), Columns("up_proj", inner, *part))
        return cls(
            column_parallel(weights, columns, hidden, bias=bias, kernels=kernels),
            RowParallel.load(
                weights.at("down_proj"), (hidden, inner), part, bias=bias, parallel=parallel, kernels=kernels
            ),
            activation or kernels.silu_mul,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        return self._down(self._activation(self._gate_up(x)))


class Embedding:
    """Token embeddings: a range of the vocabulary per rank, padded with zeros to equal sizes."""

    def __init__(self, weight: torch.Tensor, start: int, scale: float, parallel: ParallelContext) -> None:
        self.weight = weight
        self._start = start
        # Gemma was trained with the factor rounded to the dtype of the weights: 55.5 for the root of 3072 in bfloat16.
        self._scale = torch.tensor(scale, dtype=weight.dtype).item()
        self._parallel = parallel

    @classmethod
    def load(
        cls, weights: Weights, vocab_size: int, hidden_size: int, parallel: ParallelContext, scale: float = 1.0
    ) -> Embedding:
        """Loads this rank's rows of ``weight`` [vocab, hidden]; what it returns is multiplied by ``scale``."""
        weight = _vocabulary_rows(weights, vocab_size, hidden_size, parallel)
        return cls(weight, parallel.vocabulary(vocab_size)[0], scale, parallel)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T] -> [T, hidden]``, a new tensor, equal on all ranks of the stage."""
        hidden = self._look_up(input_ids)
        return hidden if self._scale == 1.0 else hidden * self._scale

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        ids = input_ids - self._start
        elsewhere = (ids < 0) | (ids >= len(self.weight))
        hidden = F.embedding(ids.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)
        return self._parallel.collective.all_reduce(hidden)


class Head:
    """Logits: vocabulary columns split over ranks, gathered on all; a soft cap c makes x into c · tanh(x / c)."""

    def __init__(self, linear: Linear, vocab_size: int, soft_cap: float | None, parallel: ParallelContext) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._soft_cap = soft_cap
        self._collective = parallel.collective

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: ModelConfig,
        embedding: Embedding | None,
        parallel: ParallelContext,
        kernels: Kernels,
    ) -> Head:
        """Loads lm_head, or takes the embeddings when they are tied (a checkpoint that stores both keeps both).

        Tied embeddings are shared with ``embedding``, or loaded if this stage has none.
        """
        if weights.has("lm_head.weight") or not config.tie_word_embeddings:
            weight = _vocabulary_rows(weights.at("lm_head"), config.vocab_size, config.hidden_size, parallel)
        elif embedding is not None:
            weight = embedding.weight
        else:
            table = weights.at("model.embed_tokens")
            weight = _vocabulary_rows(table, config.vocab_size, config.hidden_size, parallel)
        return cls(kernels.linear(weight, None), config.vocab_size, config.logit_soft_cap, parallel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] -> [rows, vocab]`` in float32, equal on the ranks of the stage."""
        logits = self._collective.all_gather(self._linear(hidden))[..., : self._vocab_size].float()
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap


def _vocabulary_rows(weights: Weights, vocab_size: int, hidden_size: int, parallel: ParallelContext) -> torch.Tensor:
    start, end, size = parallel.vocabulary(vocab_size)
    weight = weights.take("weight", (vocab_size, hidden_size), Shard(0, start, end))
    return weight if end - start == size else F.pad(weight, (0, 0, 0, size - (end - start)))
