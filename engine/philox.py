"""Philox4x32-10: one uniform number per key, with no state to keep, copy or restore.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants and known
answers are those of Random123 1.09. A counter-based generator makes the draw a pure function of its key, so a retry,
a migration, a preemption or a draft cannot change what a request samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_SHIFT = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Philox4x32-10 of ``counter`` ``[4, n]`` under ``key`` ``[2, n]``: ``[4, n]`` random words. Mutates nothing."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        if round_index:
            k0 = k0 + _WEYL_0
            k1 = k1 + _WEYL_1
        product_0 = c0.astype(np.uint64) * _MULTIPLIER_0
        product_1 = c2.astype(np.uint64) * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT).astype(np.uint32) ^ c1 ^ k0,
            (product_1 & _LOW).astype(np.uint32),
            (product_0 >> _SHIFT).astype(np.uint32) ^ c3 ^ k1,
            (product_0 & _LOW).astype(np.uint32),
        )
    return np.stack((c0, c1, c2, c3))


def uniforms(
    seeds: UInt64Array, output_indices: NDArray[np.int64], choices: NDArray[np.int64], stream: int = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, output index, choice, stream); all arrays ``[n]``.

    The counter is (output index, choice, stream, 0), the key is the seed's low and high word. ``stream`` keeps
    independent uses of one position apart; sampling a token is stream 0.
    """
    counter = np.zeros((4, len(seeds)), dtype=np.uint32)
    counter[0] = output_indices
    counter[1] = choices
    counter[2] = stream
    key = np.stack(((seeds & _LOW).astype(np.uint32), (seeds >> _SHIFT).astype(np.uint32)))
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[0] << _SHIFT | words[1]) >> np.uint64(11)
    result: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result
