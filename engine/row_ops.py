"""Operations over rows of logits that PyTorch's CPU kernels do slowly.

On a CPU tensor they run in numpy over the same memory: its argmax, sort and partition are vectorised (one row of
152,064 float32 on one core: sort 0.5 ms against 12.6 ms, argmax 15 µs against 265 µs). On other devices they are the
PyTorch operators. Results are the same, ties included, except where stated.

On CPU callers pass blocks of ``rows_per_block`` = 1 row: a row stays in cache through all passes, and its arithmetic
cannot depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 25
_BIT_VALUES = (1, 2, 4, 8, 16, 32, 64, 128)


def rows_per_block(device: torch.device, row_length: int) -> int:
    """Rows to process together: one on CPU, as many as fit 128 MiB of float32 elsewhere."""
    return 1 if device.type == "cpu" else max(1, _BLOCK_ELEMENTS // row_length)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest element of each row of ``[rows, n]``, the lowest on ties; int64 ``[rows]``."""
    if x.device.type != "cpu":
        return x.argmax(-1)
    if x.dtype == torch.float32:
        return torch.from_numpy(x.numpy().argmax(-1))
    # Row by row, so that the float32 copy of a half-precision row stays in cache.
    return torch.tensor([int(row.float().numpy().argmax()) for row in x], dtype=torch.int64)


def largest(x: Tensor, k: int) -> Tensor:
    """The ``k`` largest values of each row of float32 ``[rows, n]``, in descending order; ``k`` ≤ n."""
    if x.device.type != "cpu":
        return x.topk(k, dim=-1).values
    array = x.numpy()
    n = array.shape[-1]
    if k < n:
        array = np.partition(array, n - k, axis=-1)[:, n - k :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def descending(x: Tensor, floor: Tensor) -> Tensor:
    """Each row of float32 ``[rows, n]`` in descending order. Values below ``floor`` ``[rows, 1]`` may be left out."""
    if x.device.type != "cpu":
        return x.sort(dim=-1, descending=True).values
    array = x.numpy()
    if len(array) == 1:
        array = array[array >= floor.item()][None]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def drop_below(x: Tensor, threshold: Tensor) -> Tensor:
    """Sets what is below ``threshold`` ``[rows, 1]`` to -inf in place; returns how many stay per row, ``[rows, 1]``."""
    if x.device.type != "cpu":
        below = x < threshold
        x.masked_fill_(below, -torch.inf)
        return x.shape[-1] - below.sum(-1, keepdim=True)
    array = x.numpy()
    below_array = array < threshold.numpy()
    np.copyto(array, -np.inf, where=below_array)
    return torch.from_numpy(array.shape[-1] - np.count_nonzero(below_array, axis=-1, keepdims=True))


def best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices ``[rows, k]`` of the ``k`` largest elements, best first, lower index first on ties.

    On devices other than CPU which of the elements tied for the last place are taken is up to the device.
    """
    if x.device.type != "cpu":
        values, indices = x.topk(k, dim=-1)
        return values, indices
    array = x.numpy()
    picked = np.empty((len(array), k), dtype=np.int64)
    for row, picks in zip(array, picked, strict=True):
        threshold = np.partition(row, len(row) - k)[len(row) - k]
        candidates = np.flatnonzero(row >= threshold)
        picks[:] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    indices = torch.from_numpy(picked)
    return x.gather(-1, indices), indices


def unpack_bits(words: Tensor, length: int) -> Tensor:
    """Bool ``[rows, length]`` from an int32 bitmask ``[rows, words]``, 32 positions a word, lowest bit first.

    Positions beyond the mask are false.
    """
    if words.device.type == "cpu":
        raw: NDArray[np.uint8] = np.ascontiguousarray(words.numpy()).view(np.uint8)
        bits = torch.from_numpy(np.unpackbits(raw, axis=-1, bitorder="little").view(np.bool_))
    else:
        values = torch.tensor(_BIT_VALUES, dtype=torch.uint8, device=words.device)
        bits = (words.contiguous().view(torch.uint8).unsqueeze(-1) & values).flatten(1) != 0
    if bits.shape[-1] < length:
        bits = torch.nn.functional.pad(bits, (0, length - bits.shape[-1]))
    return bits[:, :length]


def keep_only(x: Tensor, rows: Sequence[int], kept: Tensor) -> None:
    """Sets ``x[rows[i], j]`` to -inf in place wherever ``kept`` bool ``[len(rows), n]`` is false."""
    if x.device.type == "cpu":
        array, mask = x.numpy(), kept.numpy()
        for row, row_mask in zip(rows, mask, strict=True):
            np.copyto(array[row], -np.inf, where=~row_mask)
    elif len(rows) == len(x):
        x.masked_fill_(~kept, -torch.inf)
    else:
        x[list(rows)] = x[list(rows)].masked_fill(~kept, -torch.inf)
