"""Every option of a request, at prompt lengths around block edges, for tests that compare ways to serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pair import Answer, Ask
from twinpool.engine.request import Constraint, SamplingParams, StopParams, TokenLogprob

Truth = Mapping[tuple[str, int], list[Answer]]
"""Answers by (option, prompt length): one per choice."""

BLOCK = 4
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 12, 13)
LONG_LENGTHS = (15, 16, 17, 31, 32, 33, 48)
EOS = 298
GREEDY = SamplingParams(temperature=0)
SCHEMA = """{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
"b": {"enum": ["x", "yz", null]}}, "required": ["a", "b"], "additionalProperties": false}"""
JSON = Constraint("json_schema", SCHEMA)
LETTERS = Constraint("regex", "[a-f]{1,9}")
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
NO_EOS = {"ignore_eos": True}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(seed=11)},
    "filtered": {"sampling": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, seed=2**63 + 5)},
    "penalties": {"sampling": SamplingParams(temperature=0.7, seed=3, **PENALTIES)},
    "greedy penalties": {"sampling": replace(GREEDY, **PENALTIES)},
    "logprobs": {"sampling": replace(GREEDY, logprobs=5, prompt_logprobs=2)},
    "sampled logprobs": {"sampling": SamplingParams(seed=4, logprobs=0), "stop": StopParams(4, **NO_EOS)},
    "bias": {"sampling": replace(GREEDY, logit_bias={7: 9.0, 8: -50.0}), "stop": StopParams(6, **NO_EOS)},
    "end token": {"sampling": SamplingParams(seed=5, logit_bias={EOS: 6.0}), "stop": StopParams(12)},
    "min tokens": {"sampling": replace(GREEDY, logit_bias={EOS: 99.0}), "stop": StopParams(12, 6)},
    "max 1": {"sampling": SamplingParams(seed=6), "stop": StopParams(1, **NO_EOS)},
    "max 2": {"stop": StopParams(2, **NO_EOS)},
    "n": {"sampling": SamplingParams(seed=7, n=3), "stop": StopParams(9, **NO_EOS)},
    "n until end": {"sampling": SamplingParams(seed=8, n=3, logit_bias={EOS: 6.0}), "stop": StopParams(9)},
    "json": {"sampling": SamplingParams(seed=9), "stop": StopParams(24), "constraint": JSON},
    "regex": {"sampling": SamplingParams(seed=10, n=2), "stop": StopParams(9), "constraint": LETTERS},
    "choice": {"stop": StopParams(9), "constraint": Constraint("choice", '["yes", "no", "perhaps"]')},
}


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 290, (length,), generator=generator).tolist()


def asks_of(length: int) -> dict[str, Ask]:
    """Each option has a salt of its own, so that options do not share blocks and each sees its own cache state."""
    return {name: Ask(prompt_of(length), salt=name, **option) for name, option in OPTIONS.items()}


def stop_ask(length: int, greedy: Sequence[int]) -> Ask:
    ids = frozenset({greedy[4], 299})
    return Ask(prompt_of(length), salt="stop ids", stop=StopParams(12, stop_token_ids=ids, ignore_eos=True))


def with_stops(asks: dict[str, Ask], truth: Truth, length: int) -> dict[str, Ask]:
    if ("greedy", length) not in truth:
        return asks
    return asks | {"stop ids": stop_ask(length, truth["greedy", length][0].tokens)}


def outputs_of(truth: Truth) -> dict[tuple[str, int, int], list[int]]:
    """Tokens by (option, prompt length, choice): what an ``Oracle`` needs."""
    return {(name, length, c): a.tokens for (name, length), all_ in truth.items() for c, a in enumerate(all_)}


def check(answers: Sequence[Answer], wanted: Sequence[Answer], name: str) -> None:
    """Tokens and endings are equal, log probabilities close; one answer per choice."""
    assert [answer.said for answer in answers] == [answer.said for answer in wanted], name
    for answer, want in zip(answers, wanted, strict=True):
        close(answer.logprobs, want.logprobs)
        close(answer.prompt_logprobs, want.prompt_logprobs)


def close(found: Sequence[TokenLogprob], wanted: Sequence[TokenLogprob]) -> None:
    assert [(item.token_id, item.rank) for item in found] == [(item.token_id, item.rank) for item in wanted]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
