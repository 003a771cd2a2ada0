"""A slow, plain float64 model of sampling, written from the definitions and sharing no code with the product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinpool.engine.request import SamplingParams

Array = NDArray[np.float64]


def adjusted(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    allowed: set[int] | None = None,
    forbidden: Sequence[int] = (),
) -> Array:
    values = [float(x) for x in logits]
    for token in range(len(values)):
        if allowed is not None and token not in allowed:
            values[token] = -math.inf
    masked = [-math.inf if token in forbidden else v for token, v in enumerate(values)]
    if any(v > -math.inf for v in masked):
        values = masked
    for token in range(len(values)):
        values[token] += sampling.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            r = sampling.repetition_penalty
            values[token] = values[token] / r if values[token] > 0 else values[token] * r
        count = list(output).count(token)
        values[token] -= sampling.frequency_penalty * count
        if count:
            values[token] -= sampling.presence_penalty
    return np.array(values)


def probabilities(values: Array, sampling: SamplingParams) -> Array:
    """Probability of each token; certainty of the argmax if greedy."""
    n = len(values)
    if sampling.temperature == 0:
        greedy = np.zeros(n)
        greedy[int(np.argmax(values))] = 1
        return greedy
    shifted = (values - values.max()) / sampling.temperature
    weights = np.exp(shifted)
    order = sorted(range(n), key=lambda token: (-values[token], token))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and reached >= sampling.top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
    result = np.zeros(n)
    result[kept] = weights[kept]
    return result / result.sum()


def inverse_cdf(p: Array, u: float) -> int:
    cumulative = np.cumsum(p)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
