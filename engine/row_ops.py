"""Operations over rows of logits that PyTorch's CPU kernels do slowly.

On a CPU tensor they run in numpy over the same memory, whose argmax, comparisons and sort are vectorised (one row of
152,064 float32 on one core: sort 0.5 ms against 12.6 ms, argmax 15 µs against 265 µs). On other devices they are the
PyTorch operators. Results are the same, ties included, except where stated.

On CPU callers pass blocks of ``rows_per_block`` = 1 row: a row stays in cache through all passes, and its arithmetic
cannot depend on the other rows of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 25
CHUNK = 128
_SMALLEST_WEIGHT = 4.5e-38

# Row b holds +inf where bit i of byte b is set, else -inf: the minimum with it forbids what is not set.
_BYTE_LIMITS = torch.where((torch.arange(256).unsqueeze(-1) >> torch.arange(8)) % 2 == 1, torch.inf, -torch.inf)


def rows_per_block(device: torch.device, row_length: int) -> int:
    """Rows to process together: one on CPU, as many as fit 128 MiB of float32 elsewhere."""
    return 1 if device.type == "cpu" else max(1, _BLOCK_ELEMENTS // row_length)


def _in_numpy(x: Tensor) -> bool:
    return x.device.type == "cpu"


def argmax(x: Tensor) -> Tensor:
    """Index of the largest element of each row of ``[rows, n]``, the lowest on ties; int64 ``[rows]``."""
    if not _in_numpy(x):
        return x.argmax(-1)
    if x.dtype == torch.float32:
        return torch.from_numpy(x.numpy().argmax(-1))
    # Row by row, so that the float32 copy of a half-precision row stays in cache.
    return torch.tensor([int(row.float().numpy().argmax()) for row in x], dtype=torch.int64)


def best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices ``[rows, k]`` of the ``k`` largest of float32 ``[rows, n]``, best first; ``k`` ≤ n.

    Lower index first on ties; on devices other than CPU ties are ordered as the device likes.
    """
    if not _in_numpy(x):
        values, indices = x.topk(k, dim=-1)
        return values, indices
    picked = np.empty((len(x), k), dtype=np.int64)
    for row, picks in zip(x, picked, strict=True):
        candidates = np.flatnonzero(row.numpy() >= _bound_of_largest(row, k))
        values_row = row.numpy()[candidates]
        if len(candidates) > 4 * k:
            large = values_row >= np.partition(values_row, len(values_row) - k)[len(values_row) - k]
            candidates, values_row = candidates[large], values_row[large]
        picks[:] = candidates[np.argsort(-values_row, kind="stable")[:k]]
    indices = torch.from_numpy(picked)
    return x.gather(-1, indices), indices


def _bound_of_largest(row: Tensor, k: int) -> float:
    """A value that the ``k``-th largest element reaches: the k-th largest of the maxima of disjoint chunks."""
    num_chunks = len(row) // CHUNK
    if k > num_chunks:
        return -np.inf
    maxima = row[: num_chunks * CHUNK].view(num_chunks, CHUNK).amax(-1).numpy()
    return float(np.partition(maxima, num_chunks - k)[num_chunks - k])


def descending(x: Tensor, floor: Tensor, mass: Tensor) -> Tensor:
    """Each row of float32 ``[rows, n]`` in descending order, as far as is needed.

    What is below ``floor`` ``[rows, 1]`` may be left out, and also the end of a row whose beginning reaches ``mass``
    ``[rows, 1]`` when exp is summed over it.
    """
    if not _in_numpy(x):
        return x.sort(dim=-1, descending=True).values
    rows: list[NDArray[np.float32]] = []
    for row, row_floor, row_mass in zip(x.numpy(), floor.flatten().tolist(), mass.flatten().tolist(), strict=True):
        for cut in (-4.0, -8.0, row_floor):
            chosen = row[row >= max(cut, row_floor)]
            if cut <= row_floor or np.exp(chosen).sum(dtype=np.float64) > row_mass * (1 + 1e-6):
                break
        rows.append(np.sort(chosen)[::-1])
    width = max(map(len, rows))
    padded = np.full((len(rows), width), -np.inf, dtype=np.float32)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return torch.from_numpy(padded)


def weights(z: Tensor) -> Tensor:
    """``exp(z)`` of scaled logits (maximum 0) as a new tensor, and 0 below e^-86.

    On CPUs exp is a hundred times slower where its result is denormal (a row of 152,064: 4 ms against 30 µs), which a
    low temperature makes the usual case. What is dropped is below 1e-32 of the total for any vocabulary.
    """
    return torch.threshold_(z.clamp_min(-87.0).exp_(), _SMALLEST_WEIGHT, 0.0)


def chunk_sums(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as ``[rows, chunks, 128]``, zeros appended, and the chunks' sums as float64 ``[rows, chunks]``."""
    rows, length = values.shape
    if length % CHUNK:
        values = torch.nn.functional.pad(values, (0, -length % CHUNK))
    chunks = values.view(rows, -1, CHUNK)
    return chunks, chunks.sum(-1).double()


def at_least(row: Tensor, threshold: Tensor) -> Tensor:
    """Ascending indices of the elements of ``[n]`` that are not below ``threshold`` (one element)."""
    if not _in_numpy(row):
        return (row >= threshold).nonzero().squeeze(-1)
    return torch.from_numpy(np.flatnonzero(row.numpy() >= threshold.item()))


def num_above(x: Tensor, threshold: Tensor) -> Tensor:
    """How many elements of each row of ``[rows, n]`` exceed ``threshold`` ``[rows, 1]``; int64 ``[rows]``."""
    if not _in_numpy(x):
        return (x > threshold).sum(-1)
    return torch.from_numpy(np.count_nonzero(x.numpy() > threshold.numpy(), axis=-1))


def forbid(x: Tensor, allowed: Tensor) -> None:
    """Sets float ``x`` ``[rows, n]`` to -inf in place where ``allowed`` has no bit.

    ``allowed`` int32 ``[rows, words]`` has 32 positions a word, lowest bit first; positions beyond it are forbidden.
    """
    octets = allowed.contiguous().view(torch.uint8)
    if _in_numpy(x):
        # Lookup by byte: numpy's take is twice as fast as PyTorch's here.
        limits = torch.from_numpy(np.take(_BYTE_LIMITS.numpy(), octets.numpy(), axis=0)).flatten(1)
    else:
        limits = _BYTE_LIMITS.to(x.device)[octets.int()].flatten(1)
    width = min(limits.shape[-1], x.shape[-1])
    torch.minimum(x[:, :width], limits[:, :width], out=x[:, :width])
    x[:, width:] = -torch.inf
