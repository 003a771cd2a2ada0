"""Faults that users of other systems reported, at the hand-over between the pools; numbers are those of the reports.

Scenario 17 (lengths and cache states) and 18 (what decode computes) are ``test_matrix``, 24 is ``test_migration``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from options import BLOCK, EOS, GREEDY, SCHEMA, prompt_of
from pair import Ask, Grammars, Pair, pair
from twinpool.engine.ngram import NgramProposer
from twinpool.engine.request import Constraint, FailureCode, FinishReason, SamplingParams, StopParams
from twinpool.engine.speculation import AdaptiveProposer, SpeculationController, SteadyProposer


@pytest.fixture
def both(pool: Any, grammars: Mapping[str, Grammars]) -> Iterator[Pair]:
    with pair(pool(BLOCK, 400, "decode"), pool(BLOCK, 400, "prefill"), grammars=grammars) as deployment:
        yield deployment


@pytest.fixture
def alone(pool: Any, grammars: Mapping[str, Grammars]) -> Iterator[Pair]:
    with pair(pool(BLOCK, 400, "lone decode"), grammars=grammars, caching=False) as deployment:
        yield deployment


@pytest.mark.parametrize("length", [512, 513, 700])
def test_21_a_prompt_over_the_limit_is_refused_not_cut(both: Pair, length: int) -> None:
    attempt = both.ask(Ask([5] * length))
    both.drain()
    failure = both.failure(attempt)
    assert failure is not None
    assert (failure.code, failure.field) == (FailureCode.INVALID, "prompt")
    assert "512 tokens per request" in failure.message
    assert not both.decode_sink.answers
    assert not both.prefill_sink.answers


def test_21_the_longest_prompt_gets_one_token(both: Pair, alone: Pair) -> None:
    ask = Ask(prompt_of(511), stop=StopParams(50, ignore_eos=True))
    [[answer]] = both.serve([ask])
    assert (len(answer.tokens), answer.finish) == (1, FinishReason.LENGTH)
    assert [[answer]] == alone.serve([ask])


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_22_two_requests_whose_shared_load_fails_start_over(both: Pair, alone: Pair, turns: int) -> None:
    shared = prompt_of(13)
    asks = [Ask(shared), Ask([*shared[:12], 7, 8])]
    lost = [both.ask(ask) for ask in asks]
    for _ in range(turns):
        both.turn()
    both.cut()
    both.drain()
    ended = [attempt for attempt in lost if attempt not in both.decode_sink.failures]
    for attempt in set(lost) - set(ended):
        assert both.decode_sink.failures[attempt].code is FailureCode.KV_LOST
    both.link()
    assert both.serve(asks) == alone.serve(asks)
    for attempt in ended:
        assert both.answers(attempt)[0].tokens[:1] == both.answers(attempt + 2)[0].tokens[:1]


def test_23_salt_and_revision_keep_equal_tokens_apart(both: Pair, pool: Any) -> None:
    prompt = prompt_of(12)
    for salt in ("a", "b", "a"):
        both.serve([Ask(prompt, salt=salt)])
    hits = [both.decode_sink.stats[attempt, 0].cached_tokens for attempt in (1, 2, 3)]
    assert hits == [0, 0, 12]
    hits = [both.prefill_sink.stats[attempt, 0].cached_tokens for attempt in (1, 2, 3)]
    assert hits == [0, 0, 8]
    hashes = []
    for revision in ("r1", "r2"):
        with pair(pool(BLOCK, 400, "lone decode"), revision=revision) as other:
            other.serve([Ask(prompt)])
            hashes.append(set(other.decode_sink.stored))
    assert not hashes[0] & hashes[1]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["end", "stop"])
def test_26_the_answer_ends_with_a_first_token_that_stops(both: Pair, kind: str, n: int) -> None:
    stop = StopParams(20) if kind == "end" else StopParams(20, stop_token_ids=frozenset({44}), ignore_eos=True)
    token = EOS if kind == "end" else 44
    ask = Ask(prompt_of(9), SamplingParams(seed=1, n=n, logit_bias={token: 100.0}), stop)
    [answers] = both.serve([ask])
    assert [answer.said for answer in answers] == [([token], FinishReason.STOP, token)] * n
    assert not both.decode_sink.answers


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_27_max_tokens_1_and_2(both: Pair, max_tokens: int, n: int) -> None:
    ask = Ask(prompt_of(9), SamplingParams(seed=2, n=n), StopParams(max_tokens, ignore_eos=True))
    [answers] = both.serve([ask])
    assert [len(answer.tokens) for answer in answers] == [max_tokens] * n
    assert {answer.finish for answer in answers} == {FinishReason.LENGTH}
    assert bool(both.decode_sink.answers) == (max_tokens == 2)


def test_28_min_tokens_and_a_large_limit(both: Pair) -> None:
    ask = Ask(prompt_of(6), replace(GREEDY, logit_bias={EOS: 100.0}), StopParams(500, min_tokens=100))
    [[answer]] = both.serve([ask])
    assert len(answer.tokens) == 101
    assert (answer.tokens.index(EOS), answer.finish) == (100, FinishReason.STOP)
    assert len(both.prefill_sink.answers[1, 0].tokens) == 1


def test_29_several_choices_of_several_prompts_at_once(both: Pair, alone: Pair) -> None:
    asks = [Ask(prompt_of(length), SamplingParams(seed=length, n=3)) for length in (3, 4, 5, 9)]
    found = both.serve(asks)
    assert found == alone.serve(asks)
    assert all(len({tuple(answer.tokens) for answer in answers}) == 3 for answers in found)
    assert both.prefill_sink.stats[1, 0].computed_tokens == 3  # the prompt is computed once for all choices


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_30_as_many_logprobs_as_tokens(both: Pair, max_tokens: int) -> None:
    ask = Ask(prompt_of(9), replace(GREEDY, logprobs=5), StopParams(max_tokens, ignore_eos=True))
    [[answer]] = both.serve([ask])
    assert [item.token_id for item in answer.logprobs] == answer.tokens
    assert len(answer.tokens) == max_tokens
    assert all(len(item.top) == 5 and item.top[0] == (item.token_id, item.logprob) for item in answer.logprobs)


def test_31_cached_tokens_are_none_when_cold_and_never_over_the_prompt_when_warm(both: Pair) -> None:
    for length in (1, 3, 4, 5, 8, 13):
        for asked in range(3):
            attempt = both.ask(Ask(prompt_of(length)))
            both.drain()
            for sink, most in ((both.prefill_sink, length - 1), (both.decode_sink, length)):
                stats = sink.stats[attempt, 0]
                assert stats.cached_tokens == (most // BLOCK * BLOCK if asked else 0)
                assert stats.cached_tokens + stats.computed_tokens + stats.remote_tokens == length


def test_32_prompts_shorter_than_a_block(both: Pair, alone: Pair) -> None:
    asks = [Ask(prompt_of(length)) for length in range(1, BLOCK)]
    assert both.serve(asks) == alone.serve(asks)
    assert both.serve(asks) == alone.serve(asks)


def test_a_failing_constraint_leaves_both_pools_clean(both: Pair) -> None:
    bad = both.ask(Ask(prompt_of(9), constraint=Constraint("json_schema", '{"type": "nonsense"}')))
    good = both.ask(Ask(prompt_of(9)))
    both.drain()
    failure = both.failure(bad)
    assert failure is not None
    assert (failure.code, failure.field) == (FailureCode.INVALID, "structured_output")
    assert len(both.answers(good)[0].tokens) == 12


@pytest.mark.parametrize("seed", range(5))
def test_json_from_both_pools_parses(both: Pair, tiny_llama: Any, seed: int) -> None:
    """Weights are random, so whatever is valid is due to the constraint."""
    ask = Ask(prompt_of(7), SamplingParams(seed=seed), StopParams(400), Constraint("json_schema", SCHEMA))
    [[answer]] = both.serve([ask])
    assert answer.finish is FinishReason.STOP
    text = Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).decode(answer.tokens)
    jsonschema.validate(json.loads(text), json.loads(SCHEMA))


@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_from_the_context_save_steps_and_change_nothing(
    pool: Any, grammars: Mapping[str, Grammars], alone: Pair, adaptive: bool
) -> None:
    """The constraint makes the answer repeat itself; so prompt lookup finds it."""
    constraint = Constraint("regex", "(one two ){12}")
    asks = [Ask(prompt_of(9), SamplingParams(seed=3), StopParams(300), constraint), Ask(prompt_of(13))]
    proposer = NgramProposer(2, 4, 4)
    speculation = AdaptiveProposer(proposer, SpeculationController()) if adaptive else SteadyProposer(proposer)
    both_pools = (pool(BLOCK, 400, "decode"), pool(BLOCK, 400, "prefill"))
    with pair(*both_pools, grammars=grammars, speculation=speculation) as drafting:
        assert drafting.serve(asks) == alone.serve(asks)
        stats = drafting.decode_sink.stats[1, 0]
        tokens = len(drafting.answers(1)[0].tokens)
        assert stats.accepted_tokens > 0.4 * tokens
        assert drafting.decode.load().steps * 1.5 < alone.decode.load().steps
