"""Sampling and log probabilities in C++ against the torch reference, token for token."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from kernel_cases import check_sampling

from twinpool.cache import cache_folder
from twinpool.engine.distribution import Filters, draw, scaled, truncate
from twinpool.engine.logprobs import token_logprobs
from twinpool.kernels.native_library import Level, load_library
from twinpool.kernels.native_sampling import NativeSampling

ORDER = list(Level)
LEVELS = ORDER[: ORDER.index(Level.of_machine()) + 1]
INF = math.inf


@pytest.fixture(scope="session", params=LEVELS, ids=lambda level: level.name.lower())
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return NativeSampling(load_library(cache_folder(), request.param), threads=2)


def reference(logits: torch.Tensor, parameters: np.ndarray) -> torch.Tensor:
    """The tokens of ``engine.distribution``, row by row."""
    rows = []
    for row, (temperature, top_k, top_p, log_min_p, *u) in zip(logits, parameters.tolist(), strict=True):
        z = scaled(row[None].float(), torch.tensor([[temperature]]))
        filters = Filters(
            top_k=torch.tensor([[int(top_k)]]),
            max_top_k=int(top_k),
            top_p=torch.tensor([[top_p]], dtype=torch.float64),
            has_top_p=top_p < 1,
            log_min_p=torch.tensor([[log_min_p]]),
            has_min_p=log_min_p > -INF,
        )
        z, ids = truncate(z, filters)
        tokens = draw(z, torch.tensor([u], dtype=torch.float64))[0]
        rows.append(tokens if ids is None else ids[tokens])
    return torch.stack(rows)


def some_logits(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(vocab, generator=generator) * 3
    if kind == "peaked":
        x[torch.randint(vocab, (20,), generator=generator)] += 12
    elif kind == "ties":
        x = x.round()
    elif kind == "equal":
        x.zero_()
    elif kind == "masked":
        x[torch.rand(vocab, generator=generator) < 0.97] = -INF
        x[vocab // 2] = 0.5
    elif kind == "tiny":
        x *= 1e-30
    elif kind == "huge":
        x *= 1e37
    return x


KINDS = ("flat", "peaked", "ties", "equal", "masked", "tiny", "huge")


def top_ks(vocab: int) -> list[int]:
    return sorted({1, 2, 50, 1200, vocab - 1, vocab} & set(range(1, vocab + 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, 1000, 49152])
def test_tokens_are_those_of_the_reference(native: NativeSampling, kind: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab + KINDS.index(kind))
    options = itertools.product([0.05, 0.8, 2.0], top_ks(vocab), [1.0, 0.9, 0.3, 1e-9], [-INF, math.log(0.02)])
    chosen = list(options) if vocab < 1000 else list(options)[:: 7 if vocab > 1000 else 3]
    uniforms = torch.rand((len(chosen), 40), generator=generator, dtype=torch.float64)
    uniforms[:, 0] = 0.0  # ``test_the_contract`` has the other end, where one rounding decides
    parameters = np.concatenate([np.array(chosen), uniforms.numpy()], axis=1)
    logits = torch.stack([some_logits(kind, vocab, generator) for _ in chosen])
    before = logits.clone()
    tokens = native(logits, parameters)
    assert torch.equal(logits, before)
    expected = reference(logits, parameters)
    wrong = (tokens != expected).nonzero()
    assert not len(wrong), [(chosen[row], u, tokens[row, u], expected[row, u]) for row, u in wrong.tolist()[:5]]


@pytest.mark.parametrize("vocab", [300, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_contract(native: NativeSampling, vocab: int, dtype: torch.dtype) -> None:
    check_sampling(native, vocab, dtype)


def test_rows_may_lie_apart(native: NativeSampling) -> None:
    logits = torch.randn(4, 600)
    parameters = np.array([[1.0, 600, 0.9, -INF, 0.3]] * 4)
    assert torch.equal(native(logits[:, 100:400], parameters), native(logits[:, 100:400].contiguous(), parameters))
    across = torch.randn(300, 4).t()
    assert torch.equal(native(across, parameters), native(across.contiguous(), parameters))


@pytest.mark.parametrize("top", [0, 1, 5, 20, 400, 5000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 130, 3000])
def test_log_probabilities(native: NativeSampling, vocab: int, kind: str, top: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.stack([some_logits(kind, vocab, generator) for _ in range(6)])
    rows = [4, 0, 0, 5, 2]
    token_ids = torch.randint(vocab, (5,), generator=generator).tolist()
    token_ids[0] = int(logits[4].argmax())
    actual = token_logprobs(logits, rows, token_ids, top, native)
    for mine, theirs in zip(actual, token_logprobs(logits, rows, token_ids, top), strict=True):
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        values = [mine.logprob, *(value for _, value in mine.top)]
        assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], rel=1e-6, abs=1e-5)


def test_a_row_that_is_no_distribution_has_log_probabilities_of_nan(native: NativeSampling) -> None:
    logits = torch.full((2, 300), -INF)
    logits[1] = torch.randn(300)
    logits[1, 7] = math.nan
    for entry in token_logprobs(logits, [0, 1], [3, 3], 2, native):
        assert math.isnan(entry.logprob)
        assert len(entry.top) == 2
