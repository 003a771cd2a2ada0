"""Sampled frequencies and each filter's definition, against an independent float64 model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from twinpool.engine.distribution import draw
from twinpool.engine.philox import uniforms
from twinpool.engine.request import SamplingParams, StopParams

from .helpers import EOS, make_request, make_sampler, mask_of, sample_one, schedule, seeded
from .reference import adjusted, inverse_cdf, probabilities

VOCAB = 75
OPTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=9),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.999),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.08),
    SamplingParams(top_k=12, top_p=0.8),
    SamplingParams(top_k=VOCAB, top_p=0.8),
    SamplingParams(top_k=10_000),
    SamplingParams(temperature=1.3, top_k=30, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.3, top_p=0.95, min_p=0.2),
    SamplingParams(logit_bias={3: 4.0, 7: -100.0, 74: 2.5}),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.4),
    SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.92,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={5: 3.0, 6: -2.0},
    ),
]
PROMPT = [4, 9, 9, 30, 12]
OUTPUT = [9, 5, 5, 5, 61, 74]


def logits_row(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, VOCAB, generator=generator) * 2


@pytest.mark.parametrize("sampling", OPTIONS)
@pytest.mark.parametrize("constrained", [False, True])
def test_frequencies_follow_the_exact_distribution(sampling: SamplingParams, constrained: bool) -> None:
    logits = logits_row(11)
    allowed = set(range(0, VOCAB, 3)) | {EOS, 74} if constrained else None
    expected = probabilities(
        adjusted(logits[0].tolist(), sampling, PROMPT, OUTPUT, allowed, forbidden=(EOS, 33)), sampling
    )
    request = make_request(
        seeded(sampling, 2024), PROMPT, OUTPUT, stop=StopParams(100, min_tokens=20, stop_token_ids=frozenset({33}))
    )
    mask = mask_of([allowed], VOCAB) if allowed else None
    n = 20_000
    tokens = sample_one(logits, request, mask, num_samples=n).token_ids
    counts = np.bincount(tokens, minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    common = expected * n >= 5
    observed, wanted = counts[common], expected[common] * n
    if expected[~common].sum() > 0:
        observed = np.append(observed, counts[~common].sum())
        wanted = np.append(wanted, expected[~common].sum() * n)
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4
    else:
        assert observed[0] == n


@pytest.mark.parametrize("sampling", OPTIONS)
def test_each_token_is_the_inverse_cdf_at_its_key(sampling: SamplingParams) -> None:
    """Stronger than frequencies: the very token, over many logits, seeds and output lengths."""
    sampler = make_sampler(VOCAB)
    for seed in range(60):
        logits = logits_row(seed)
        output = OUTPUT[: seed % 7]
        request = make_request(seeded(sampling, seed << 40 | seed), PROMPT, output, choice=seed % 3)
        key = (np.array([request.sampling.seed], np.uint64), np.array([len(output)]), np.array([seed % 3]))
        p = probabilities(adjusted(logits[0].tolist(), sampling, PROMPT, output), sampling)
        expected = inverse_cdf(p, float(uniforms(*key)[0]))
        assert sample_one(logits, request, sampler=sampler).token_ids == [expected]


def test_over_seeds_and_output_indices() -> None:
    logits = logits_row(3)
    expected = probabilities(logits[0].double().numpy(), SamplingParams())
    n = 3000
    for requests in (
        [make_request(SamplingParams(seed=s)) for s in range(n)],
        [make_request(SamplingParams(seed=1), output=[1] * i) for i in range(n)],
    ):
        sampled = make_sampler(VOCAB).sample(logits.expand(n, -1), [schedule(r) for r in requests], [None] * n)
        counts = np.bincount([s.token_ids[0] for s in sampled], minlength=VOCAB)
        common = expected * n >= 5
        observed = np.append(counts[common], counts[~common].sum())
        wanted = np.append(expected[common], expected[~common].sum()) * n
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_ids(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]], dtype=dtype)
    assert sample_one(logits, make_request()).token_ids == [1]
    for sampling, kept in [
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=3), {1, 2, 3}),
        (SamplingParams(top_k=4), {1, 2, 3, 4}),
        (SamplingParams(top_p=0.6), {1, 3}),
        (SamplingParams(top_p=0.7), {1, 2, 3}),
        (SamplingParams(min_p=0.3), {1, 2, 3, 4, 5}),
        (SamplingParams(top_p=0.99, min_p=0.3), {1, 2, 3, 4, 5}),
    ]:
        tokens = sample_one(logits, make_request(sampling), num_samples=500).token_ids
        assert set(tokens) == kept, sampling


def test_greedy_ignores_the_filters_but_not_penalties() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.5, 1.0]])
    sampling = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5)
    assert sample_one(logits, make_request(sampling)).token_ids == [1]
    assert sample_one(logits, make_request(replace(sampling, presence_penalty=1.0), output=[1])).token_ids == [2]
    assert sample_one(logits, make_request(replace(sampling, logit_bias={3: 9.0}))).token_ids == [3]


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
def test_no_uniform_selects_a_token_of_probability_zero(vocab: int) -> None:
    edges = torch.tensor([[0.0, 2.0**-53, 0.5, 1 - 2.0**-33, 1 - 2.0**-53, 1.0]], dtype=torch.float64)
    for last in {0, vocab // 2, vocab - 1}:
        z = torch.full((1, vocab), -torch.inf)
        z[0, last] = 0.0
        assert draw(z.clone(), edges).tolist() == [[last] * edges.shape[-1]]
        z[0, 0] = 0.0
        tokens = draw(z.clone(), edges)[0].tolist()
        assert tokens[0] == 0
        assert tokens[-2:] == [last, last]
        assert set(tokens) == {0, last}


def test_chunks_of_many_tiny_weights_keep_their_mass() -> None:
    z = torch.full((1, 200_000), -12.0)
    z[0, 77] = 0.0
    mass = 199_999 * float(np.exp(np.float32(-12.0))) + 1
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    hits = (draw(z, u.unsqueeze(0)) == 77).sum().item()
    assert abs(hits / n - 1 / mass) < 1.5 / n


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    tokens = sample_one(logits, make_request(SamplingParams(temperature=1e-30)), num_samples=50).token_ids
    assert set(tokens) == {0}


def test_rows_without_a_distribution_do_not_disturb_others() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = torch.nan
    request = make_request(SamplingParams(top_p=0.9, seed=4))
    batch = make_sampler(VOCAB).sample(logits, [schedule(request)] * 3, [None, None, None])
    alone = [sample_one(logits[i : i + 1], request).token_ids for i in (0, 2)]
    assert [batch[0].token_ids, batch[2].token_ids] == alone
    assert 0 <= batch[1].token_ids[0] < VOCAB
