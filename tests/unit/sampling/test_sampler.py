"""Batches, masks, end tokens, log probabilities and drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from twinpool.engine import row_ops
from twinpool.engine.plan import ScheduledRequest
from twinpool.engine.request import Request, RequestState, SamplingParams, StopParams
from twinpool.engine.sampler import Sampler, accepted

from .helpers import CPU, EOS, make_request, make_sampler, mask_of, sample_one, schedule, seeded

VOCAB = 101
MIX = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(top_k=20, top_p=0.5, min_p=0.1),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={4: 2.0}),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(logprobs=3, top_p=0.9),
]


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    rng = random.Random(5)
    logits = random_logits(len(MIX), 1).to(dtype)
    requests = [
        make_request(seeded(s, 1000 + i), prompt=[3, 4, 5], output=rng.choices(range(VOCAB), k=i))
        for i, s in enumerate(MIX)
    ]
    mask = mask_of([set(range(0, VOCAB, 2))], VOCAB)
    masks = [mask if i % 3 == 0 else None for i in range(len(MIX))]
    alone = [
        make_sampler(VOCAB).sample(logits[i : i + 1], [schedule(r)], [m])[0]
        for i, (r, m) in enumerate(zip(requests, masks, strict=True))
    ]
    before = logits.clone()
    sampler = make_sampler(VOCAB)
    for _ in range(5):
        order = rng.sample(range(len(MIX)), k=len(MIX))
        batch = sampler.sample(logits[order], [schedule(requests[i]) for i in order], [masks[i] for i in order])
        assert batch == [alone[i] for i in order]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("in_numpy", [True, False])
def test_blocks_of_many_rows_draw_the_same(in_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of devices that batch rows, with and without the numpy forms of the row operations."""
    rng = random.Random(6)
    requests = [
        make_request(seeded(MIX[i % len(MIX)], i), prompt=[3], output=rng.choices(range(VOCAB), k=i % 5))
        for i in range(60)
    ]
    logits = random_logits(60, 7)
    tied = torch.arange(VOCAB) % 7 == 3
    logits[::4, tied] = logits[::4].amax(-1, keepdim=True)
    masks = [mask_of([set(range(i % 4, VOCAB, 2))], VOCAB) if i % 3 == 0 else None for i in range(60)]
    scheduled = [schedule(r) for r in requests]
    one_by_one = make_sampler(VOCAB).sample(logits, scheduled, masks)
    monkeypatch.setattr(row_ops, "_in_numpy", lambda _: in_numpy)
    monkeypatch.setattr(row_ops, "rows_per_block", lambda _device, _length: 16)
    batched = make_sampler(VOCAB).sample(logits, scheduled, masks)
    assert [s.token_ids for s in batched] == [s.token_ids for s in one_by_one]
    for one, other in zip(one_by_one, batched, strict=True):
        assert [e.rank for e in one.logprobs] == [e.rank for e in other.logprobs]
        assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=1e-6)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.05), SamplingParams(temperature=0.05, top_p=0.9)])
def test_low_temperatures_draw_only_what_has_weight(sampling: SamplingParams) -> None:
    logits = torch.linspace(-30, 0, 1000).unsqueeze(0)
    tokens = sample_one(logits, make_request(sampling), num_samples=2000).token_ids
    assert max(tokens) == 999
    assert min(tokens) > 950


def test_choices_of_one_row_are_the_choices_sampled_apart() -> None:
    logits = random_logits(1, 2)
    base = make_request(SamplingParams(seed=3, n=4, logprobs=1))
    together = sample_one(logits, base, num_samples=4)
    apart = [sample_one(logits, make_request(base.sampling, choice=c)) for c in range(4)]
    assert together.token_ids == [s.token_ids[0] for s in apart]
    assert together.logprobs == [s.logprobs[0] for s in apart]
    greedy = sample_one(logits, make_request(SamplingParams(temperature=0, n=3)), num_samples=3)
    assert greedy.token_ids == [int(logits.argmax())] * 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_only_allowed_tokens(vocab: int) -> None:
    for tokens in ({0}, {vocab - 1}, set(range(0, vocab, 5)), set(range(vocab))):
        mask = mask_of([tokens], vocab)
        request = make_request(SamplingParams(temperature=5))
        drawn = sample_one(random_logits(1, 3, vocab), request, mask, num_samples=400).token_ids
        assert set(drawn) <= tokens
        assert len(tokens) > 8 or set(drawn) == tokens
        assert sample_one(random_logits(1, 3, vocab), make_request(), mask).token_ids[0] in tokens


def test_a_mask_with_fewer_words_than_the_vocabulary_forbids_the_rest() -> None:
    mask = torch.tensor([[-1]], dtype=torch.int32)
    drawn = sample_one(torch.zeros(1, 100), make_request(SamplingParams()), mask, num_samples=500).token_ids
    assert max(drawn) < 32


def test_end_tokens_are_impossible_below_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 5] = 50.0, 49.0
    for sampling in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
    ):
        stop = StopParams(100, min_tokens=3, stop_token_ids=frozenset({5, 4000}))
        for length in range(5):
            token = sample_one(logits, make_request(sampling, output=[1] * length, stop=stop)).token_ids[0]
            assert (token in (EOS, 5)) == (length >= 3)


def test_a_grammar_that_admits_only_the_end_wins_over_min_tokens() -> None:
    stop = StopParams(100, min_tokens=3)
    logits = torch.zeros(1, 10)
    request = make_request(SamplingParams(), stop=stop)
    assert set(sample_one(logits, request, mask_of([{EOS}], 10), num_samples=50).token_ids) == {EOS}
    assert set(sample_one(logits, request, mask_of([{EOS, 7}], 10), num_samples=50).token_ids) == {7}


def test_penalties_follow_the_request_through_preemption_and_migration() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = torch.tensor([[3.0, 2.5, 2.2, 0.0]])
    request = make_request(sampling)
    sampler = make_sampler(4, stop_ids=())
    for _ in range(12):
        [sampled] = sampler.sample(logits, [schedule(request)], [None])
        request.output_ids += sampled.token_ids
        moved = make_request(sampling, output=request.output_ids)
        assert sample_one(logits, moved) == sampler.sample(logits, [schedule(request)], [None])[0]
    # Each token pays 1 per occurrence, so the three best take turns by what is left of their lead.
    assert request.output_ids[:6] == [0, 1, 2, 0, 1, 2]


def test_state_of_finished_requests_is_dropped() -> None:
    sampler = make_sampler(VOCAB)
    logits = random_logits(1, 1)
    for _ in range(200):
        request = make_request(SamplingParams(presence_penalty=1.0))
        sampler.sample(logits, [schedule(request)], [None])
        request.set_state(RequestState.FINISHED, 0.0)
    assert len(sampler._adjustments) < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_raw_logits(dtype: torch.dtype) -> None:
    logits = random_logits(1, 9).to(dtype)
    reference = torch.log_softmax(logits.double(), -1)[0]
    sampling = SamplingParams(temperature=0.5, top_k=3, logit_bias={8: 30.0}, presence_penalty=2.0, logprobs=6)
    mask = mask_of([set(range(8, VOCAB))], VOCAB)
    [entry] = sample_one(logits, make_request(sampling, output=[20]), mask).logprobs
    assert entry.token_id == 8
    assert entry.logprob == pytest.approx(reference[8].item(), abs=1e-5)
    assert entry.rank == 1 + int((reference > reference[8]).sum())
    order = sorted(range(VOCAB), key=lambda t: (-reference[t].item(), t))[:6]
    assert [t for t, _ in entry.top] == order
    assert [v for _, v in entry.top] == pytest.approx(reference[order].tolist(), abs=1e-5)


def test_logprobs_without_alternatives_and_beyond_the_vocabulary() -> None:
    logits = random_logits(1, 4, 5)
    assert sample_one(logits, make_request(SamplingParams(logprobs=0))).logprobs[0].top == ()
    assert len(sample_one(logits, make_request(SamplingParams(logprobs=20))).logprobs[0].top) == 5
    assert sample_one(logits, make_request(SamplingParams())).logprobs == []


def test_prompt_logprobs() -> None:
    logits = random_logits(6, 4)
    tokens = [5, 0, 100, 7, 7, 50]
    reference = torch.log_softmax(logits.double(), -1)
    entries = make_sampler(VOCAB).prompt_logprobs(logits, tokens, 2)
    assert [e.token_id for e in entries] == tokens
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(reference[i, tokens[i]].item(), abs=1e-5)
        assert entry.rank == 1 + int((reference[i] > reference[i, tokens[i]]).sum())
        assert [t for t, _ in entry.top] == reference[i].topk(2).indices.tolist()


def test_rows_must_match() -> None:
    sampler = make_sampler(VOCAB)
    with pytest.raises(ValueError, match="logits are"):
        sampler.sample(random_logits(2, 1), [schedule(make_request())], [None])
    with pytest.raises(ValueError, match="several samples"):
        sampler.sample(random_logits(2, 1), [schedule(make_request(drafts=[1]), num_samples=2)], [None])
    assert sampler.sample(torch.zeros(0, VOCAB), [], []) == []


@pytest.mark.parametrize(
    ("samples", "drafts", "emitted"),
    [
        ([7], [], [7]),
        ([7, 8], [7], [7, 8]),
        ([7, 8], [9], [7]),
        ([7, 8, 9, 1], [7, 8, 9], [7, 8, 9, 1]),
        ([7, 8, 9, 1], [7, 5, 9], [7, 8]),
        ([7, 7, 7], [8, 7], [7]),
    ],
)
def test_rejection_rule(samples: list[int], drafts: list[int], emitted: list[int]) -> None:
    assert accepted(samples, drafts) == emitted


Allowed = Callable[[Sequence[int]], set[int]]


def model(context: Sequence[int]) -> Tensor:
    """Logits that depend on the last two tokens, peaked enough for drafts to be right now and then."""
    seed = hash(tuple(context[-2:])) & 0xFFFFFF
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3)


def no_two_neighbours(output: Sequence[int]) -> set[int]:
    """A made-up constraint that depends on all output: never a token adjacent to the last, no token five times."""
    return {t for t in range(VOCAB) if output.count(t) < 5 and (not output or abs(t - output[-1]) > 1)}


def generate(
    request: Request, length: int, allowed: Allowed | None, draft: Callable[[Request], list[int]]
) -> list[int]:
    sampler = Sampler(VOCAB, frozenset({EOS}), CPU)
    while len(request.output_ids) < length:
        request.draft_ids = draft(request)
        contexts = [request.output_ids + request.draft_ids[:j] for j in range(len(request.draft_ids) + 1)]
        logits = torch.stack([model(list(request.prompt_ids) + c) for c in contexts])
        mask = None if allowed is None else mask_of([allowed(c) for c in contexts], VOCAB)
        entry = ScheduledRequest(request, len(contexts), True, num_drafts=len(request.draft_ids))
        [sampled] = sampler.sample(logits, [entry], [mask])
        request.output_ids += sampled.token_ids
    return request.output_ids[:length]


@pytest.mark.parametrize("sampling", MIX)
@pytest.mark.parametrize("allowed", [None, no_two_neighbours])
def test_drafts_change_nothing(sampling: SamplingParams, allowed: Allowed | None) -> None:
    sampling = replace(sampling, seed=99, logprobs=None)
    stop = StopParams(1000, min_tokens=30)
    length = 60
    plain = generate(make_request(sampling, [5, 6], stop=stop), length, allowed, lambda _: [])
    assert EOS not in plain[:30]
    rng = random.Random(8)
    num_steps = 0

    def draft(request: Request) -> list[int]:
        nonlocal num_steps
        num_steps += 1
        start = len(request.output_ids)
        tokens = plain[start : start + rng.randrange(5)]
        if tokens and rng.random() < 0.5:
            tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB)
        return tokens

    assert generate(make_request(sampling, [5, 6], stop=stop), length, allowed, draft) == plain
    assert num_steps < length


def test_logprobs_run_beside_accepted_drafts() -> None:
    request = make_request(SamplingParams(temperature=0, logprobs=1), drafts=[4, 9, 1])
    logits = torch.zeros(4, 10)
    logits[[0, 1, 2, 3], [4, 9, 7, 3]] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    sampled = sample_one(logits, request)
    assert sampled.token_ids == [4, 9, 7]
    reference = torch.log_softmax(logits, -1)
    expected = [reference[i, t].item() for i, t in enumerate([4, 9, 7])]
    assert [e.logprob for e in sampled.logprobs] == pytest.approx(expected, abs=1e-6)
