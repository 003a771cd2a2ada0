# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code of sampling: a program per row of logits, from logits to tokens, without a sort and without the host.

Scaled logits are at most 0, so the bits of their magnitude order them: key 0 is the best token. top-k and top-p look
for the key at which a count, or a mass, is reached, by bisecting the 31 bits; each look is a pass over a row that stays
in cache. Among the tokens at that key the lowest ids are kept, as many as are needed (the ``quota``).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(logits, column, vocab, best, temperature):
    """Keys and unnormalised float32 probabilities of a block; beyond the vocabulary the largest int and 0."""
    x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    distance = tl.abs((x - best) / temperature)
    key = distance.to(tl.int32, bitcast=True)
    key = tl.where(column < vocab, key, 0x7FFFFFFF)
    return key, tl.where(distance > 86.0, 0.0, tl.exp(-distance))


@triton.jit
def _tally(logits, vocab, best, temperature, limit, BLOCK: tl.constexpr):
    """How many tokens have a key up to ``limit``, and their mass in float64."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        key, weight = _keys(logits, start + tl.arange(0, BLOCK), vocab, best, temperature)
        count += tl.sum((key <= limit).to(tl.int32), 0)
        mass += tl.sum(tl.where(key <= limit, weight, 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _kept(logits, start, vocab, best, temperature, limit, quota, ties, BLOCK: tl.constexpr):
    """Float64 weights of a block, 0 where dropped, and the tokens at ``limit`` so far."""
    key, weight = _keys(logits, start + tl.arange(0, BLOCK), vocab, best, temperature)
    tied = (key == limit).to(tl.int32)
    kept = (key <= limit).to(tl.int32)
    total = ties + tl.sum(tied, 0)
    if total > quota:
        rank = ties + tl.cumsum(tied, 0)
        kept = tl.where((tied == 1) & (rank > quota), 0, kept)
    return tl.where(kept == 1, weight, 0.0).to(tl.float64), total


@triton.jit(do_not_specialize=["draws"])
def sample_kernel(logits, parameters, tokens, draws, vocab, row_stride, BLOCK: tl.constexpr):
    """``parameters`` [rows, 4 + draws] and ``tokens`` [rows, draws]: see ``RowSampling``.

    A row without a finite maximum, or with a NaN, gives token 0.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    parameters += row * (4 + draws)
    tokens += row * draws
    temperature = tl.load(parameters).to(tl.float32)
    top_k = tl.load(parameters + 1).to(tl.int32)
    top_p = tl.load(parameters + 2)
    log_min_p = tl.load(parameters + 3).to(tl.float32)

    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.zeros([], tl.int32)
    broken = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 0))
        largest = tl.max(x, 0)
        first = tl.min(tl.where(x == largest, column, vocab), 0)
        best_token = tl.where(largest > best, first, best_token)
        best = tl.maximum(best, largest)

    if (temperature == 0.0) | (broken == 1) | (tl.abs(best) == float("inf")):
        token = tl.where((temperature == 0.0) & (broken == 0), best_token, 0).to(tl.int64)
        for draw in range(0, draws):
            tl.store(tokens + draw, token)
    else:
        limit = tl.full([], 0x7F800000, tl.int32)
        quota = tl.zeros([], tl.int32) + vocab
        if top_k < vocab:
            low = tl.zeros([], tl.int32)
            for _ in range(0, 31):
                middle = low + (limit - low) // 2
                count, _mass = _tally(logits, vocab, best, temperature, middle, BLOCK)
                enough = (count >= top_k) & (low < limit)
                limit = tl.where(enough, middle, limit)
                low = tl.where(enough, low, tl.minimum(middle + 1, limit))
            count, _mass = _tally(logits, vocab, best, temperature, limit - 1, BLOCK)
            quota = top_k - count
        if top_p < 1.0:
            before, mass_before = _tally(logits, vocab, best, temperature, limit - 1, BLOCK)
            count, _mass = _tally(logits, vocab, best, temperature, limit, BLOCK)
            weight = tl.exp(-(limit.to(tl.float32, bitcast=True))).to(tl.float64)
            needed = top_p * (mass_before + tl.minimum(quota, count - before) * weight)
            low = tl.zeros([], tl.int32)
            high = limit
            for _ in range(0, 31):
                middle = low + (high - low) // 2
                _count, mass = _tally(logits, vocab, best, temperature, middle, BLOCK)
                enough = (mass >= needed) & (low < high)
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, tl.minimum(middle + 1, high))
            _count, mass = _tally(logits, vocab, best, temperature, high - 1, BLOCK)
            weight = tl.exp(-(high.to(tl.float32, bitcast=True))).to(tl.float64)
            wanted = tl.ceil((needed - mass) / tl.maximum(weight, 1e-300))
            wanted = tl.minimum(tl.maximum(wanted, 1.0), vocab.to(tl.float64)).to(tl.int32)
            quota = tl.where(high < limit, wanted, tl.minimum(quota, wanted))
            limit = high
        floor = tl.abs(log_min_p).to(tl.int32, bitcast=True)
        quota = tl.where(floor < limit, vocab, quota)
        limit = tl.minimum(limit, floor)

        total = tl.zeros([], tl.float64)
        ties = tl.zeros([], tl.int32)
        for start in range(0, vocab, BLOCK):
            weights, ties = _kept(logits, start, vocab, best, temperature, limit, quota, ties, BLOCK)
            total += tl.sum(weights, 0)
        for draw in range(0, draws):
            # Kept strictly below the total, so that no uniform selects a token of probability zero.
            target = tl.minimum(tl.load(parameters + 4 + draw) * total, total * (1.0 - 2.3e-16))
            running = tl.zeros([], tl.float64)
            ties = tl.zeros([], tl.int32)
            token = best_token
            for start in range(0, vocab, BLOCK):
                weights, ties = _kept(logits, start, vocab, best, temperature, limit, quota, ties, BLOCK)
                after = running + tl.sum(weights, 0)
                if (running <= target) & (after > target):
                    column = start + tl.arange(0, BLOCK)
                    beyond = (running + tl.cumsum(weights, 0) > target) & (weights > 0.0)
                    first = tl.min(tl.where(beyond, column, vocab), 0)
                    last = tl.max(tl.where(weights > 0.0, column, 0), 0)
                    token = tl.where(first < vocab, first, last)
                running = after
            tl.store(tokens + draw, token.to(tl.int64))
