"""Linear layers on CPU: ours, or for bfloat16 oneDNN's where that is faster here for so many rows.

Both pack the weight once. oneDNN has bfloat16 only where the processor has AVX-512; there each new shape is timed, some
milliseconds at load, and a layer keeps the packed weights of the winners only. Elsewhere, and for float32, ours is the
only one: its rows do not depend on each other (``linear.h``), which neither oneDNN nor MKL promises.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence

import torch

from twinpool.kernels.arena import Arena
from twinpool.kernels.interface import Linear
from twinpool.kernels.native_library import NativeLibrary
from twinpool.kernels.onednn import OneDnnLinear, can_prepack

ROWS = (1, 4, 16, 64, 256, 512)
"""Numbers of rows that are timed. A batch takes the winner of the next one that is not smaller, or of the last."""


class LinearChoice:
    """Makes linear layers; remembers which implementation won for a shape."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._arena = Arena()
        self._winners: dict[torch.Size, tuple[int, ...]] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer for ``weight`` [out, in], float32 or bfloat16, on CPU."""

        def ours() -> Linear:
            return NativeLinear(self._library, weight, bias, self._threads, self._arena)

        def onednn() -> Linear:
            return OneDnnLinear(weight, bias, widen=False)

        if not can_prepack(weight):
            return ours()
        makers = (ours, onednn)
        winners = self._winners.get(weight.shape)
        layers = {i: makers[i]() for i in (range(len(makers)) if winners is None else set(winners))}
        if winners is None:
            winners = self._winners[weight.shape] = fastest(list(layers.values()), weight.shape[1])
        if len(set(winners)) == 1:
            return layers[winners[0]]
        return RowsLinear([layers[winner] for winner in winners])


class NativeLinear:
    """``x @ weight.T + bias``; keeps the packed weight. Each row's bits depend on that row alone."""

    def __init__(
        self, library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None, threads: int, arena: Arena
    ) -> None:
        self._library = library
        self._threads = threads
        self._columns, self._depth = weight.shape
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.contiguous()
        self._tiles = arena.keep(pack(weight, library.width, paired=library.paired))
        # Constant arguments, looked up once.
        self._pointers = self._tiles.data_ptr(), None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``."""
        x = x.contiguous()
        rows = x.shape[0]
        tiles, bias = self._pointers
        output = torch.empty((rows, self._columns), dtype=self._dtype)
        # Sixteen products take as long as a value elsewhere.
        self._library.functions(rows * self._depth * self._columns // 16).linear(
            self._dtype == torch.bfloat16,
            x.data_ptr(),
            rows,
            self._depth,
            tiles,
            self._columns,
            bias,
            output.data_ptr(),
            self._threads,
        )
        return output


def pack(weight: torch.Tensor, width: int, *, paired: bool) -> torch.Tensor:
    """Tiles of 2 · ``width`` output features for multiply.h, padded with zeros.

    float32: [tiles, in, 2 · width]. bfloat16, ``paired``: a 32-bit lane holds two neighbouring inputs of a feature,
    [tiles, pairs, 2, width, 2]; otherwise it holds features i and ``width`` + i of one input, [tiles, in, width, 2].
    """
    columns, depth = weight.shape
    paired = paired and weight.dtype == torch.bfloat16
    tiles = -(-columns // (2 * width))
    padded = torch.nn.functional.pad(weight, (0, depth % 2 if paired else 0, 0, tiles * 2 * width - columns))
    if weight.dtype == torch.float32:
        return padded.view(tiles, 2 * width, depth).permute(0, 2, 1)
    if paired:
        return padded.view(tiles, 2, width, -1, 2).permute(0, 3, 1, 2, 4)
    return padded.view(tiles, 2, width, depth).permute(0, 3, 2, 1)


class RowsLinear:
    """Calls one of several equal layers, by the number of rows."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        """``layers[i]`` is for batches up to ``ROWS[i]``, the last one for all above."""
        self._layers = (*layers, layers[-1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, in] -> [rows, out]``."""
        return self._layers[bisect.bisect_left(ROWS, x.shape[0])](x)


def fastest(candidates: Sequence[Linear], depth: int) -> tuple[int, ...]:
    """Which of ``candidates`` is fastest for each of ``ROWS``, on ``depth`` input features."""
    winners = []
    for rows in ROWS:
        x = torch.zeros((rows, depth), dtype=torch.bfloat16)
        seconds = [_seconds(layer, x) for layer in candidates]
        winners.append(seconds.index(min(seconds)))
    return tuple(winners)


def _seconds(layer: Linear, x: torch.Tensor) -> float:
    """Of the fastest of three calls: other programs only ever add to it."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - began)
    return best
