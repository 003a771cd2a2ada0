"""Operators in C++ for CPUs (``native.cpp``): float32 and bfloat16, one native call each.

Norms, rotary with the KV write, activations, attention and linear layers run in C++ for both dtypes; what is missing
here is the reference's. In float32 a row's bits depend neither on the other rows of the batch nor on the number of
threads: what a request is answered does not depend on what is computed beside it.
"""

from __future__ import annotations

import ctypes

import torch

from twinpool.kernels.interface import Attention, AttentionBatch, Experts, Linear
from twinpool.kernels.native_library import NativeLibrary
from twinpool.kernels.native_linear import LinearChoice
from twinpool.kernels.reference import GroupedExperts, ReferenceKernels

DTYPES = (torch.float32, torch.bfloat16)


class NativeKernels:
    """Implements ``Kernels`` for tensors on the CPU of ``DTYPES``."""

    def __init__(self, library: NativeLibrary, *, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._reference = ReferenceKernels(prepack=True)
        self._linears = LinearChoice(library, threads)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``Kernels.linear``."""
        if weight.device.type != "cpu" or weight.dtype not in DTYPES:
            return self._reference.linear(weight, bias)
        return self._linears.linear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Kernels.rms_norm``."""
        output = torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, None, weight, eps, output)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.add_rms_norm``."""
        residual = residual.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, residual, weight, eps, output)
        return output, residual

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, output: torch.Tensor
    ) -> None:
        size = x.shape[-1]
        outer, inner = (x.shape[0], x.shape[1]) if x.dim() == 3 else (x.numel() // size, 1)
        if x.dim() > 3 or x.stride(-1) != 1 or (inner > 1 and x.stride(1) != size):
            x = x.contiguous()
        self._library.functions(x.numel()).rms_norm(
            x.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
            x.data_ptr(),
            x.stride(0) if x.dim() < 4 else size,
            outer,
            inner,
            size,
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            output.data_ptr(),
            self._threads,
        )

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
        tokens, heads, dim = query_key.shape
        query_key, value = _heads(query_key), _heads(value)
        self._library.functions(query_key.numel()).rotary_write(
            query_key.dtype == torch.bfloat16,
            query_key.data_ptr(),
            query_key.stride(0),
            value.data_ptr(),
            value.stride(0),
            cos.contiguous().data_ptr(),
            sin.contiguous().data_ptr(),
            tokens,
            heads,
            value.shape[1],
            dim,
            kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
            kv.shape[4],
            kv.stride(0),
            slot_mapping.data_ptr(),
            self._threads,
        )
        return query_key

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.silu_mul``."""
        return self._gated(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Kernels.gelu_tanh_mul``."""
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, size), dtype=gate_up.dtype)
        self._library.functions(gate_up.numel()).gated(
            gate_up.dtype == torch.bfloat16,
            gelu,
            gate_up.data_ptr(),
            rows,
            size,
            output.data_ptr(),
            self._threads,
        )
        return output

    def route(self, logits: torch.Tensor, num_chosen: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernels.route``."""
        return self._reference.route(logits, num_chosen, normalise=normalise)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """See ``Kernels.experts``."""
        pairs = [(self.linear(g, None), self.linear(d, None)) for g, d in zip(gate_up, down, strict=True)]
        return GroupedExperts(pairs, self.silu_mul)

    def attention(self, batch: AttentionBatch, kv: torch.Tensor) -> Attention:
        """See ``Kernels.attention``."""
        return _PagedAttention(self._library, batch, kv, self._threads)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, D] with the heads of a token side by side; copied only if they are not."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) else x.contiguous()


class _Batch(ctypes.Structure):
    """``Batch`` of attention_layer.h."""

    _fields_ = [
        ("tables", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("requests", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
    ]


class _PagedAttention:
    """Implements ``Attention``."""

    def __init__(self, library: NativeLibrary, batch: AttentionBatch, kv: torch.Tensor, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._tensors = batch.block_tables.contiguous(), batch.query_start_loc, batch.seq_lens
        tables, starts, lengths = self._tensors
        requests, width = tables.shape
        _, _, _, kv_heads, block_size, dim = kv.shape
        self._batch = _Batch(
            *(tables.data_ptr(), starts.data_ptr(), lengths.data_ptr(), requests, width),
            *(0, kv_heads, dim, block_size, kv.stride(0)),
        )
        self._keys = sum(batch.context_lens)

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
        query = _heads(query)
        output = torch.empty(query.shape, dtype=query.dtype)
        self._batch.heads = query.shape[1]
        self._library.functions(self._keys * query.shape[1] * query.shape[2]).attention(
            query.dtype == torch.bfloat16,
            ctypes.addressof(self._batch),
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
            output.data_ptr(),
            scale,
            window or 0,
            soft_cap or 0.0,
            self._threads,
        )
        return output
