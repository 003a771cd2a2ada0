"""Operators in plain torch: the specification for all others, and what runs where nothing faster exists.

Attention gathers the blocks that a group of requests can see with one ``index_select`` (a memory copy per head and
block), then calls SDPA. Requests with few queries (decode, draft verification) and similar lengths form one group;
long chunks run alone, and without any gather when nothing precedes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from twinpool.kernels.interface import Attention, AttentionBatch, Experts, Linear
from twinpool.kernels.onednn import OneDnnLinear, can_prepack, prefers_float32

MAX_GROUPED_QUERIES = 16
"""Requests with more queries than this run alone: padding them would cost more than it saves."""


class ReferenceKernels:
    """Implements ``Kernels``. With ``prepack``, linear layers are repacked by oneDNN where it supports their dtype."""

    def __init__(self, *, prepack: bool) -> None:
        self._prepack = prepack

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``Kernels.linear``."""
        if self._prepack and can_prepack(weight):
            return OneDnnLinear(weight, bias, widen=prefers_float32())
        return DenseLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Kernels.rms_norm``."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (weight * (x32 * scale).to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.add_rms_norm``."""
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def rotary_write(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Kernels.rotary_write``."""
        query_key = self.rotary(query_key, cos, sin)
        self.write_kv(query_key[:, query_key.shape[1] - value.shape[1] :], value, kv, layer, slot_mapping)
        return query_key

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates the halves of the last dimension of ``x`` [T, heads, D] by ``cos`` and ``sin`` [T, D / 2]."""
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.silu_mul``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.gelu_tanh_mul``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.route``."""
        weights, ids = logits.float().softmax(-1).topk(num_chosen, dim=-1)
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """See ``Kernels.experts``."""
        return GroupedExperts(
            [(self.linear(g, None), self.linear(d, None)) for g, d in zip(gate_up, down, strict=True)], self.silu_mul
        )

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, slot_mapping: torch.Tensor
    ) -> None:
        """Writes rows ``key`` and ``value`` [T, G, D] of a layer to their slots."""
        block_size = kv.shape[4]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        kv[:, layer, 0][blocks, :, offsets] = key
        kv[:, layer, 1][blocks, :, offsets] = value

    def attention(self, batch: AttentionBatch, kv: torch.Tensor) -> Attention:
        """See ``Kernels.attention``."""
        return _GatheredAttention(batch, kv)


class DenseLinear:
    """A linear layer as torch has it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``."""
        return F.linear(x, self._weight, self._bias)


class GroupedExperts:
    """Implements ``Experts``: one dense MLP per expert that was chosen, over the rows that chose it."""

    def __init__(
        self, experts: Sequence[tuple[Linear, Linear]], activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._experts = experts
        self._activation = activation

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        # Sorting (row, choice) pairs by expert makes each expert's rows one range; stable keeps rows in order.
        order = ids.flatten().argsort(stable=True)
        rows = order // ids.shape[1]
        weight = weights.flatten()[order, None]
        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        end = 0
        for expert, count in enumerate(ids.flatten().bincount(minlength=len(self._experts)).tolist()):
            if count:
                start, end = end, end + count
                gate_up, down = self._experts[expert]
                result = down(self._activation(gate_up(x[rows[start:end]])))
                output.index_add_(0, rows[start:end], result * weight[start:end])
        return output.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Keys:
    """What a group's queries may see: ``[B, G, blocks]`` (block, head) rows in layer 0's K, bool mask [B, 1, L, S]."""

    heads: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class _Group:
    """B requests with L queries each, and up to S keys, padded.

    ``rows`` are the query rows in batch order (None: all rows of the batch, in order).
    """

    rows: torch.Tensor | None
    batch: int
    queries: int
    tables: torch.Tensor
    """[B, blocks]: block ids; rows end in zeros."""
    positions: torch.Tensor
    """[B, L]: position of each query."""
    keys: dict[int | None, _Keys] = field(default_factory=dict)
    """By window."""


class _GatheredAttention:
    """Implements ``Attention``; see the module docstring."""

    def __init__(self, batch: AttentionBatch, kv: torch.Tensor) -> None:
        _, self._num_layers, _, self._num_heads, self._block_size, self._head_dim = kv.shape
        self._flat = kv.view(-1, self._block_size * self._head_dim)
        self._groups: list[_Group] = []
        self._whole: list[tuple[int, int]] = []
        starts = [0]
        for length in batch.query_lens:
            starts.append(starts[-1] + length)
        grouped: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            if queries == context and queries > 1:
                self._whole.append((starts[index], queries))
            elif queries > MAX_GROUPED_QUERIES:
                self._groups.append(self._group(batch, [index], queries, starts))
            else:
                # Lengths within a factor of two share a group, so at most half of what is gathered is padding.
                grouped[queries, max(-(-context // self._block_size), 16).bit_length()].append(index)
        for (queries, _), members in grouped.items():
            self._groups.append(self._group(batch, members, queries, starts))

    def _group(self, batch: AttentionBatch, members: list[int], queries: int, starts: list[int]) -> _Group:
        device = batch.block_tables.device
        num_blocks = max(-(-batch.context_lens[i] // self._block_size) for i in members)
        steps = torch.arange(queries, device=device)
        rows: torch.Tensor | None = None
        if len(members) == len(batch.query_lens):
            tables, seq_lens = batch.block_tables[:, :num_blocks], batch.seq_lens
        else:
            index = torch.tensor(members, device=device)
            tables, seq_lens = batch.block_tables[index, :num_blocks], batch.seq_lens[index]
            rows = (batch.query_start_loc[index, None] + steps).flatten()
        return _Group(
            rows=rows,
            batch=len(members),
            queries=queries,
            tables=tables,
            positions=seq_lens[:, None] - queries + steps,
        )

    def _keys(self, group: _Group, window: int | None) -> _Keys:
        """The blocks that ``window`` reaches; keys of other requests' length lie after a query's position, unseen."""
        keys = group.keys.get(window)
        if keys is not None:
            return keys
        tables, device = group.tables, group.tables.device
        width, first = tables.shape[1], torch.zeros((1, 1), dtype=torch.int64, device=device)
        if window is not None:
            # The queries see window + queries - 1 keys, which start anywhere in a block.
            reach = (window + group.queries + self._block_size - 3) // self._block_size + 1
            if reach < width:
                first = (group.positions[:, :1] - (window - 1)).clamp(min=0) // self._block_size
                columns = (first + torch.arange(reach, device=device)).clamp(max=width - 1)
                tables, width = tables.gather(1, columns), reach
        positions = (first * self._block_size + torch.arange(width * self._block_size, device=device))[:, None, None]
        mask = positions <= group.positions[:, None, :, None]
        if window is not None:
            mask &= positions > group.positions[:, None, :, None] - window
        stride = self._num_layers * 2 * self._num_heads
        heads = tables[:, None, :] * stride + torch.arange(self._num_heads, device=device)[:, None]
        keys = group.keys[window] = _Keys(heads, mask)
        return keys

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """See ``Attention``."""
        output = torch.empty_like(query)
        for start, length in self._whole:
            end = start + length
            output[start:end] = self._attend_whole(
                query[start:end], key[start:end], value[start:end], scale, window, soft_cap
            )
        for group in self._groups:
            rows = query if group.rows is None else query.index_select(0, group.rows)
            attended = self._attend_group(group, rows, layer, scale, window, soft_cap)
            if group.rows is None:
                return attended
            output[group.rows] = attended
        return output

    def _attend_whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """A chunk that nothing precedes: all its keys are in the batch."""
        length = query.shape[0]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        if soft_cap is None and (window is None or window >= length):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            positions = torch.arange(length, device=query.device)
            mask = positions <= positions[:, None]
            if window is not None:
                mask &= positions > positions[:, None] - window
            attended = _attend(q, k, v, mask, scale, soft_cap)
        return attended[0].transpose(0, 1)

    def _attend_group(
        self,
        group: _Group,
        query: torch.Tensor,
        layer: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Queries [B · L, H, D] over gathered keys."""
        batch, queries, num_heads = group.batch, group.queries, query.shape[1]
        shape = (batch, self._num_heads, -1, self._head_dim)
        keys = self._keys(group, window)
        first = layer * 2 * self._num_heads
        k = self._flat.index_select(0, (keys.heads + first).flatten()).view(shape)
        v = self._flat.index_select(0, (keys.heads + (first + self._num_heads)).flatten()).view(shape)
        if queries == 1:
            # The query heads that share a KV head become its queries: no key is repeated.
            q = query.view(batch, self._num_heads, num_heads // self._num_heads, self._head_dim)
            return _attend(q, k, v, keys.mask, scale, soft_cap).reshape(batch, num_heads, self._head_dim)
        q = query.view(batch, queries, num_heads, self._head_dim).transpose(1, 2)
        attended = _attend(q, k, v, keys.mask, scale, soft_cap)
        return attended.transpose(1, 2).reshape(batch * queries, num_heads, self._head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, soft_cap: float | None
) -> torch.Tensor:
    """Attention of [B, H, L, D] over [B, G, S, D] with a bool mask that broadcasts to [B, H, L, S]."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / soft_cap)) * soft_cap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(v.dtype) @ v
